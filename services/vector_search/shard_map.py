"""The map of one shard: a sample of its chunks in a plane, drawn in the background, kept until the shard has changed.

Reading never draws: `read` returns the last drawing, and asks `draw` for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common.clock import Clock
from common.errors import InvalidRequest
from common.wire.search import DocumentsWork, MapPart, MapPoint
from services.vector_search.documents import Documents
from services.vector_search.index.index import Index
from services.vector_search.index.rows import Flags, Ints, RowsView, prepare
from services.vector_search.projection import Basis, fit, sampled

MOST_POINTS = 5000
CHANGED_SHARE = 0.05  # a map is drawn again after more than this share of rows changed
_TITLES = ("title", "name")  # fields of metadata
_TITLE_LENGTH = 80
_LOOKED_UP = 200


class Drawing(NamedTuple):
    """A drawn map: points with their labels, the shard's last label then, and whether the plane is another shard's."""

    basis: Basis
    part: MapPart
    labels: Ints
    last_label: int
    borrowed: bool


class ShardMap:
    """Draws a shard's map on one thread; any thread may `read`. It calls `wanted` when `draw` has work."""

    def __init__(self, index: Index, documents: Documents, dimension: int, clock: Clock) -> None:
        self.wanted: Callable[[], object] = _nothing
        self._index, self._documents = index, documents
        self._dimension, self._clock = dimension, clock
        self._drawing: Drawing | None = None
        self._wish: bytes | None = None  # plane of the next map; b"" is the shard's own

    def read(self, work: DocumentsWork) -> MapPart:
        """Return the points of `work.ids` in `work.basis`, or the drawn sample (empty before the first drawing)."""
        if work.basis and len(work.basis) != 12 * self._dimension:
            raise InvalidRequest(
                f"basis has {len(work.basis)} bytes; expected {12 * self._dimension}, as a map of this collection has",
                param="basis",
            )
        if work.ids:
            if not work.basis:
                raise InvalidRequest("ids without a basis to draw them in", param="basis")
            return MapPart(basis=work.basis, points=self._points_of(work))
        lacking, drawing, rows = self.lacks(work), self._drawing, self._index.rows.view
        if drawing is None or not _suits(drawing, work.basis):
            return MapPart(basis=work.basis, pending=lacking)
        stale = _changed(drawing, rows) > CHANGED_SHARE
        if stale:
            self._ask(work.basis)
        there = np.flatnonzero(_live(rows, drawing.labels))[: max(work.sample, 0)]
        points = [drawing.part.points[place] for place in there.tolist()]
        return msgspec.structs.replace(drawing.part, pending=stale, points=points)

    def lacks(self, work: DocumentsWork) -> bool:
        """Return whether the map that a work asks for is not drawn yet; if so, ask `draw` to draw it."""
        drawing, rows = self._drawing, self._index.rows.view
        if work.ids or (drawing is not None and _suits(drawing, work.basis)):
            return False
        lacking = bool(rows.live[: rows.size].any())
        if lacking:
            self._ask(work.basis)
        return lacking

    def _ask(self, basis: bytes) -> None:
        self._wish = basis
        self.wanted()

    def _points_of(self, work: DocumentsWork) -> list[MapPoint]:
        """Return up to MOST_POINTS points of documents: of all their chunks, or of one each, as `chunks` names them."""
        basis, points = Basis.decode(work.basis), list[MapPoint]()
        chosen = list[int | None](work.chunks) or [None] * len(work.ids)
        for name, chunk in zip(work.ids, chosen, strict=True):
            for found in self._documents.get([name], text=False, vectors=True):
                rows = np.frombuffer(found.vectors or b"", "<f4").reshape(-1, self._dimension)
                first, last = (0, len(rows)) if chunk is None else (chunk, chunk + 1)
                places = basis.project(prepare(rows[first:last], self._index.metric)).tolist()
                title = _title(found.metadata)
                points += [
                    MapPoint(name, first + i, x, y, title) for i, (x, y) in enumerate(places)
                ]
            if len(points) >= MOST_POINTS:
                break
        return points[:MOST_POINTS]

    # -- background

    def draw(self) -> bool:
        """Draw the map that was last asked for; False if there was none to draw."""
        wish, self._wish = self._wish, None
        if wish is None:
            return False
        view, before = self._index.rows.view, self._drawing
        rows = sampled(view, MOST_POINTS)
        if not len(rows):
            self._drawing = None
            return True
        matrix, explained = view.matrix[rows], 0.0
        if wish:
            basis = Basis.decode(wish)
        else:
            basis, explained = fit(matrix, before.basis if before else None)
        places = basis.project(matrix).tolist()
        points = self._named(dict(zip(view.labels[rows].tolist(), places, strict=True)))
        part = MapPart(
            basis=basis.encode(),
            rows=int(np.count_nonzero(view.live[: view.size])),
            computed_ms=self._clock.now_ms(),
            explained=explained,
            points=list(points.values()),
        )
        labels = np.fromiter(points, np.int64, len(points))
        self._drawing = Drawing(basis, part, labels, int(view.labels[view.size - 1]), bool(wish))
        return True

    def _named(self, places: dict[int, tuple[float, float]]) -> dict[int, MapPoint]:
        """Return a point for each label that still exists, in the same order."""
        labels, points = list(places), dict[int, MapPoint]()
        for first in range(0, len(labels), _LOOKED_UP):  # metadata may be large
            some = labels[first : first + _LOOKED_UP]
            hits = self._documents.hits(some, with_text=False, with_metadata=True)
            for label in some:
                if (hit := hits.get(label)) is not None:
                    x, y = places[label]
                    points[label] = MapPoint(hit.id, hit.chunk, x, y, _title(hit.metadata))
        return points


def _nothing() -> None:
    """Do nothing: the default of `wanted`."""


def _suits(drawing: Drawing, basis: bytes) -> bool:
    """Return whether a drawing is in the plane `basis`, or, for b"", in the shard's own plane."""
    return drawing.part.basis == basis if basis else not drawing.borrowed


def _live(view: RowsView, labels: Ints) -> Flags:
    """Return for each label whether its row is live."""
    rows = np.searchsorted(view.labels[: view.size], labels)
    found = rows < view.size
    rows = np.where(found, rows, 0)
    live: Flags = found & (view.labels[rows] == labels) & view.live[rows]
    return live


def _changed(drawing: Drawing, view: RowsView) -> float:
    """Return the rows added and deleted since the drawing, as a share of the live rows at the drawing."""
    newer = int(np.searchsorted(view.labels[: view.size], drawing.last_label, "right"))
    added = int(np.count_nonzero(view.live[newer : view.size]))
    kept = int(np.count_nonzero(view.live[:newer]))
    return (added + drawing.part.rows - kept) / max(drawing.part.rows, 1)


def _title(metadata: dict[str, Any] | None) -> str | None:
    """Return a document's title or name from its metadata, cut to _TITLE_LENGTH characters; None without one."""
    for field in _TITLES:
        value = (metadata or {}).get(field)
        if isinstance(value, str) and value.strip():
            return value.strip()[:_TITLE_LENGTH]
    return None
