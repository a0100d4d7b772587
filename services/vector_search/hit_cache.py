"""Hits by label, from a cache or the database, each as the JSON object that a client gets."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import msgspec

from common.wire.search import Hit, SearchWork
from services.vector_search.documents import Documents
from services.vector_search.index.rows import Floats, Ints

_CACHE_BYTES = 32 * 1024 * 1024
_HIT_BYTES = 300
_WAYS = 8


class HitRows(NamedTuple):
    """The hits of each query as JSON objects, their scores, and whether every found label still exists.

    For a work that is `alone`, the objects of each query are one piece, joined by commas.
    """

    shown: list[list[bytes]]
    scores: list[list[float]]
    complete: bool


class HitJson(NamedTuple):
    """The JSON of a hit without its score: the part before, which begins with a comma, and the part after."""

    before: bytes
    after: bytes

    def whole(self, score: bytes) -> bytes:
        """Return the hit with the JSON of a score."""
        return b"".join((self.before, score, self.after))[1:]


class HitCache:
    """Turns labels into hits, and keeps the hits; the oldest leave when the cache is full.

    A label's passage never changes, so a kept hit is right while the index finds its label.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._lock = threading.Lock()
        self._kept: dict[int, HitJson] = {}  # by label and included fields: see `_how`
        self._bytes = 0

    def of(
        self, labels: list[Ints] | Ints, scores: list[Floats] | Floats, work: SearchWork
    ) -> HitRows:
        """Return the hits of each query's labels, without labels whose chunks are gone."""
        how = _how(work)
        if work.min_score is not None:
            near = [row >= work.min_score for row in scores]
            labels = [row[good] for row, good in zip(labels, near, strict=True)]
            scores = [row[good] for row, good in zip(scores, near, strict=True)]
        if isinstance(labels, list) or isinstance(scores, list):
            keys = [(_WAYS * row + how).tolist() for row in labels]
            near_rows = [row.tolist() for row in scores]
        else:
            keys, near_rows = (_WAYS * labels + how).tolist(), scores.tolist()
        shown = _joined if work.alone else _shown
        try:
            return HitRows(shown(self._kept, keys, near_rows), near_rows, complete=True)
        except KeyError:
            known = self._look_up({key for row in keys for key in row}, work, how)
        complete = True
        for row, near_row in zip(keys, near_rows, strict=True):
            gone = [place for place, key in enumerate(row) if key not in known]
            for place in reversed(gone):
                complete = False
                del row[place], near_row[place]
        return HitRows(shown(known, keys, near_rows), near_rows, complete=complete)

    def json_of(self, labels: set[int], work: SearchWork) -> dict[int, HitJson]:
        """Return by label the hit, without a score, of each label whose chunk still exists."""
        how = _how(work)
        found = self._look_up({_WAYS * label + how for label in labels}, work, how)
        return {key // _WAYS: hit for key, hit in found.items()}

    def _look_up(self, keys: set[int], work: SearchWork, how: int) -> dict[int, HitJson]:
        kept = self._kept
        known = {key: hit for key in keys if (hit := kept.get(key)) is not None}
        if len(known) < len(keys):
            missing = sorted(key // _WAYS for key in keys - known.keys())
            found = self._documents.hits(
                missing,
                with_text=work.with_text,
                with_metadata=work.with_metadata,
                following=work.following,
            )
            read = {_WAYS * label + how: _around(hit) for label, hit in found.items()}
            known |= read
            self._keep(read)
        return known

    def _keep(self, read: dict[int, HitJson]) -> None:
        with self._lock:
            for key, hit in read.items():
                if key not in self._kept:
                    self._kept[key] = hit
                    self._bytes += _size(hit)
            while self._bytes > _CACHE_BYTES and self._kept:
                oldest = next(iter(self._kept))
                self._bytes -= _size(self._kept.pop(oldest))


def _how(work: SearchWork) -> int:
    """Return the set of included fields (metadata, text, following text) as a number below _WAYS."""
    return 4 * work.following + 2 * work.with_text + work.with_metadata


def _pieces(known: dict[int, HitJson], row: list[int], near: list[float]) -> list[bytes]:
    """Return the JSON of one query's hits in three pieces each; KeyError if a hit is not known."""
    pieces = [b""] * (3 * len(row))
    if row:
        pieces[::3], pieces[2::3] = zip(*map(known.__getitem__, row), strict=True)
        pieces[1::3] = msgspec.json.encode(near)[1:-1].split(b",")
    return pieces


def _joined(
    known: dict[int, HitJson], keys: list[list[int]], scores: list[list[float]]
) -> list[list[bytes]]:
    """Return the JSON of each query's hits as one piece, [] without hits; KeyError if a hit is not known."""
    rows = [b"".join(_pieces(known, row, near))[1:] for row, near in zip(keys, scores, strict=True)]
    return [[row] if row else [] for row in rows]


def _shown(
    known: dict[int, HitJson], keys: list[list[int]], scores: list[list[float]]
) -> list[list[bytes]]:
    """Return for each query the JSON of each hit; KeyError if a hit is not known."""
    rows = [_pieces(known, row, near) for row, near in zip(keys, scores, strict=True)]
    return [[b"".join(row[at : at + 3])[1:] for at in range(0, len(row), 3)] for row in rows]


class _After(msgspec.Struct, gc=False):
    chunk: int
    start: int
    end: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    following: str | msgspec.UnsetType = msgspec.UNSET


def _around(hit: Hit) -> HitJson:
    text = msgspec.UNSET if hit.text is None else hit.text
    metadata = msgspec.UNSET if hit.metadata is None else hit.metadata
    following = msgspec.UNSET if hit.following is None else hit.following
    after = msgspec.json.encode(_After(hit.chunk, hit.start, hit.end, text, metadata, following))
    return HitJson(b',{"id":%b,"score":' % msgspec.json.encode(hit.id), b"," + after[1:])


def _size(hit: HitJson) -> int:
    return _HIT_BYTES + len(hit.before) + len(hit.after)
