"""Recent queries of an index's users, by which its recall is measured."""

from __future__ import annotations

from collections import deque

import numpy as np

from services.vector_search.index.rows import Floats
from services.vector_search.index.search_path import AUDITED


class RecentQueries:
    """Remembers the latest queries; any number of threads remember, one reads."""

    def __init__(self) -> None:
        self._kept: deque[Floats] = deque(maxlen=AUDITED)
        self._place = 0

    def remember(self, queries: Floats) -> None:
        """Keep one query of a batch: another place of every batch, so that a repeated request is not all there is."""
        place = self._place = (self._place + 1) % max(len(queries), 1)
        self._kept.append(queries[place : place + 1])

    def all(self) -> Floats:
        """Return the queries that are remembered, the latest last."""
        kept = list(self._kept)
        return np.vstack(kept) if kept else np.zeros((0, 0), np.float32)

    @property
    def full(self) -> bool:
        """Whether there are as many as an audit compares."""
        return len(self._kept) == AUDITED
