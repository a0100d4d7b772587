"""The hits behind found labels, from a cache or the database."""

from __future__ import annotations

import sys
import threading

from common.wire.search import Hit, SearchWork
from services.vector_search.documents import Documents
from services.vector_search.index.index import Neighbours

_CACHE_BYTES = 32 * 1024 * 1024
_HIT_BYTES = 400


class HitCache:
    """Turns labels into hits. A label's passage never changes, so a hit that was read may be shown again for as long as
    the index finds its label; the oldest leave when the cache is full.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._lock = threading.Lock()
        self._kept: dict[int, Hit] = {}  # by label and what of it is shown
        self._bytes = 0

    def of(self, found: Neighbours, work: SearchWork) -> tuple[bool, list[list[Hit]]]:
        """Return whether every found label still exists, and the hits of those that do, per query."""
        how = 2 * work.with_text + work.with_metadata
        labels, scores = found.labels, found.scores
        if work.min_score is not None:
            near = [row >= work.min_score for row in scores]
            labels = [row[good] for row, good in zip(labels, near, strict=True)]
            scores = [row[good] for row, good in zip(scores, near, strict=True)]
        keys = [(4 * row + how).tolist() for row in labels]
        near_rows = [row.tolist() for row in scores]
        try:
            return True, _shown(self._kept, keys, near_rows)
        except KeyError:
            known = self._look_up({key for row in keys for key in row}, work, how)
        complete = True
        for row, near_row in zip(keys, near_rows, strict=True):
            gone = [place for place, key in enumerate(row) if key not in known]
            for place in reversed(gone):
                complete = False
                del row[place], near_row[place]
        return complete, _shown(known, keys, near_rows)

    def _look_up(self, keys: set[int], work: SearchWork, how: int) -> dict[int, Hit]:
        kept = self._kept
        known = {key: hit for key in keys if (hit := kept.get(key)) is not None}
        if len(known) < len(keys):
            missing = sorted(key // 4 for key in keys - known.keys())
            found = self._documents.hits(
                missing, with_text=work.with_text, with_metadata=work.with_metadata
            )
            read = {4 * label + how: hit for label, hit in found.items()}
            known |= read
            self._keep(read)
        return known

    def _keep(self, read: dict[int, Hit]) -> None:
        with self._lock:
            for key, hit in read.items():
                if key not in self._kept:
                    self._kept[key] = hit
                    self._bytes += _size(hit)
            while self._bytes > _CACHE_BYTES and self._kept:
                oldest = next(iter(self._kept))
                self._bytes -= _size(self._kept.pop(oldest))


def _shown(
    known: dict[int, Hit], keys: list[list[int]], scores: list[list[float]]
) -> list[list[Hit]]:
    """Return the hits of each query with its own scores; KeyError if one is not known."""
    return [
        [
            Hit(hit.id, score, hit.chunk, hit.start, hit.end, hit.text, hit.metadata)
            for hit, score in zip(map(known.__getitem__, row), near, strict=True)
        ]
        for row, near in zip(keys, scores, strict=True)
    ]


def _size(hit: Hit) -> int:
    metadata = 0 if hit.metadata is None else 4 * len(str(hit.metadata))
    return _HIT_BYTES + metadata + (sys.getsizeof(hit.text) if hit.text is not None else 0)
