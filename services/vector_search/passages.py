"""The passages behind found labels: what a hit shows, from a cache or the database."""

from __future__ import annotations

import sys
import threading

from common.messages import Hit, SearchWork
from services.vector_search.documents import Documents
from services.vector_search.index.index import Found
from services.vector_search.index.rows import Floats, Ints

_CACHE_BYTES = 32 * 1024 * 1024
_HIT_BYTES = 400
Key = tuple[int, bool, bool]


class Passages:
    """Turns labels into hits. A label's passage never changes, so what was read once may be shown again for as
    long as the index finds the label; the oldest leave when the cache is full.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._lock = threading.Lock()
        self._kept: dict[Key, Hit] = {}
        self._bytes = 0

    def of(self, found: Found, work: SearchWork) -> tuple[bool, list[list[Hit]]]:
        """Return whether every found label still exists, and the hits of those that do, per query."""
        pairs: list[tuple[Ints, Floats]] = list(zip(found.labels, found.scores, strict=True))
        if work.min_score is not None:
            pairs = [(labels[s >= work.min_score], s[s >= work.min_score]) for labels, s in pairs]
        rows = [(labels.tolist(), scores.tolist()) for labels, scores in pairs]
        wanted = {label for labels, _ in rows for label in labels}
        known = self._look_up(wanted, work)
        complete = len(known) == len(wanted)
        hits = []
        for labels, scores in rows:
            parts = [(known[x], s) for x, s in zip(labels, scores, strict=True) if x in known]
            hits.append(
                [Hit(h.id, s, h.chunk, h.start, h.end, h.text, h.metadata) for h, s in parts]
            )
        return complete, hits

    def _look_up(self, labels: set[int], work: SearchWork) -> dict[int, Hit]:
        how = work.with_text, work.with_metadata
        kept = self._kept
        known = {x: hit for x in labels if (hit := kept.get((x, *how))) is not None}
        missing = labels - known.keys()
        if missing:
            read = self._documents.hits(sorted(missing), with_text=how[0], with_metadata=how[1])
            known |= read
            self._keep(read, how)
        return known

    def _keep(self, read: dict[int, Hit], how: tuple[bool, bool]) -> None:
        with self._lock:
            for label, hit in read.items():
                if (label, *how) not in self._kept:
                    self._kept[label, *how] = hit
                    self._bytes += _size(hit)
            while self._bytes > _CACHE_BYTES and self._kept:
                oldest = next(iter(self._kept))
                self._bytes -= _size(self._kept.pop(oldest))


def _size(hit: Hit) -> int:
    metadata = 0 if hit.metadata is None else 4 * len(str(hit.metadata))
    return _HIT_BYTES + metadata + (sys.getsizeof(hit.text) if hit.text is not None else 0)
