"""An HNSW graph over rows of 8 bits, built and searched by a kernel that scores the best exactly.

The walk reads a quarter of the bytes; the rows themselves, which stay where they are, rank its results. Searches take
no lock: they may meet an insertion, and see the graph as it is in that moment. Without the kernel there is `Graph`.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from common.native.finder import open_first
from services.vector_search.index.delayed import Delay, Walked
from services.vector_search.index.graph import EF_CONSTRUCTION, Graph
from services.vector_search.index.native.sources import TRAVERSE, TRAVERSE_AVX2
from services.vector_search.index.rows import Floats, Ints, Metric, RowsView, VectorRows
from services.vector_search.index.search_path import FEW_LINKS

# More than k of what the walk found are scored exactly: rounding may swap near neighbours.
_SPARE = 10
_LANE = 64
_GROWTH = 1.5
_HIGHEST = 15
_MAGIC = b"spillway graph 1\n"
# hnswlib hands out its graph as one copy: larger ones are built anew.
_MOST_COPIED_BYTES = 4 << 30
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ref, _first = ctypes.byref, ctypes.c_char.from_buffer
_ROWS, _SCORES = np.dtype(np.int64), np.dtype(np.float32)


class _Layout(ctypes.Structure):
    """`Graph` of traverse.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("dimension", "width", "links", "upper_links")),
        *((name, _INT) for name in ("slots", "rows", "l2")),
        *((name, _POINTER) for name in ("state", "near", "upper", "upper_at", "heights")),
        *((name, _POINTER) for name in ("codes", "weights", "matrix", "live", "labels")),
    )


@cache
def kernel() -> Any:
    """Return the kernel, or None where it is not built or this processor cannot run it."""
    library = open_first([TRAVERSE, TRAVERSE_AVX2])
    return None if library is None else declared(library)


def declared(library: Any) -> Any:
    """Return a library of the kernel with the types of its functions told."""
    search = library.spillway_search
    search.argtypes = [_POINTER, _POINTER, *[_INT] * 6, _POINTER, _POINTER]
    search.restype = _INT
    delayed = library.spillway_search_delayed
    delayed.argtypes = [_POINTER, _POINTER, *[_INT] * 4, _POINTER, _INT, _INT, *[_POINTER] * 3]
    delayed.restype = _INT
    library.spillway_encode.argtypes = [_POINTER, _POINTER, _POINTER, _INT, _INT]
    library.spillway_encode.restype = None
    library.spillway_insert.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT]
    library.spillway_insert.restype = None
    return library


def _address(array: Any) -> Any:
    """Return an array's address; the way for arrays that may be written to is quicker, which single queries feel."""
    return _ref(_first(array)) if array.flags.writeable else array.ctypes.data


def _aligned(shape: tuple[int, int], kind: Any) -> Any:
    """Return an array of zeros that begins where a cache line does; memory is taken as it is written to."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    raw = np.zeros(size + _LANE, np.uint8)
    begin = -raw.ctypes.data % _LANE
    return raw[begin : begin + size].view(kind).reshape(shape)


@cache
def _settings(delay: Delay) -> Any:
    """Return a delay as the kernel reads it; ValueError if it cannot be."""
    return (_INT * len(delay))(*delay.checked())


# While the rows that two candidates lead to come from memory, those of two others are scored.
_USUAL = _settings(Delay(groups=2, candidates=2))


class _Shape(msgspec.Struct, frozen=True):
    """The sizes of a graph: row width in bytes, most links of a node on the lowest level and on those above."""

    dimension: int
    width: int
    links: int
    upper_links: int

    @classmethod
    def of(cls, dimension: int, links: int, upper_links: int) -> Self:
        return cls(dimension, -(-dimension // _LANE) * _LANE, links, upper_links)


class _Arrays:
    """What a graph is made of: room for `slots` rows, and for the links of `places` levels above the lowest."""

    def __init__(self, shape: _Shape, slots: int, places: int) -> None:
        self.state = np.array([0, -1, 0], np.int64)  # entry, levels, above all rows in the graph
        self.near = _aligned((slots, shape.links + 1), np.uint32)
        self.upper = _aligned((places, shape.upper_links + 1), np.uint32)
        self.upper_at = np.zeros(slots, np.uint32)
        self.heights = np.zeros(slots, np.uint8)
        self.codes = _aligned((slots, shape.width), np.uint8)
        self.weights = _aligned((slots, 2), np.float32)

    def all(self) -> tuple[Any, ...]:
        """Return the arrays as the layout has them."""
        return (
            self.state,
            self.near,
            self.upper,
            self.upper_at,
            self.heights,
            self.codes,
            self.weights,
        )

    def used(self, places: int) -> list[Any]:
        """Return the parts of them that are taken."""
        nodes = int(self.state[2])
        ends = {id(self.state): 3, id(self.upper): places}
        return [array[: ends.get(id(array), nodes)] for array in self.all()]


class _Laid(NamedTuple):
    """A layout, its address, and the arrays it points to, which it keeps alive."""

    layout: _Layout
    at: int
    matrix: Floats
    kept: tuple[Any, ...]


class NativeGraph:
    """A graph over a shard's rows; scores follow the metric (higher is nearer). One thread adds, any number search.

    Deleted rows need not be marked: they are walked over, and their live mark keeps them from results.
    """

    turn_s = (
        0.02  # no search waits meanwhile, but rows that are not added yet are compared one by one
    )

    def __init__(
        self,
        rows: VectorRows,
        metric: Metric,
        capacity: int,
        threads: int,
        *,
        links: int = FEW_LINKS,
        lowest_links: int = 0,
    ) -> None:
        """Make an empty graph; a node has nearly twice the links on the lowest level: with their count whole lines."""
        self.metric: Metric = metric
        self.threads = threads
        self.ef = 64
        self._library = kernel()
        self._rows = rows
        self._shape = _Shape.of(rows.dimension, lowest_links or 2 * links - 1, links)
        self._rng = np.random.default_rng(capacity)
        self._places = 0  # of links above the lowest level, that are taken
        self._arrays = _Arrays(self._shape, max(capacity, 1), capacity // (links - 1) + 64)
        self._laid = self._lay_out()

    def _lay_out(self) -> _Laid:
        """Return where everything is now; searches that began before go on with what they know."""
        view, shape = self._rows.view, self._shape
        kept = (*self._arrays.all(), view.matrix, view.live, view.labels)
        layout = _Layout(
            shape.dimension, shape.width, shape.links, shape.upper_links,
            len(self._arrays.near), len(view.live), self.metric == "l2",
            *(array.ctypes.data for array in kept),
        )  # fmt: skip
        return _Laid(layout, ctypes.addressof(layout), view.matrix, kept)

    def _now(self, view: RowsView) -> _Laid:
        """Return the layout of this moment, which must be held as long as the kernel uses it."""
        laid = self._laid
        if laid.matrix is not view.matrix:
            laid = self._laid = self._lay_out()
        return laid

    def over(self, rows: VectorRows) -> None:
        """Take the rows of a graph that was loaded; before, it finds nothing."""
        self._rows = rows
        self._laid = self._lay_out()

    def set_ef(self, ef: int) -> None:
        """Set how many candidates a search keeps."""
        self.ef = ef

    @property
    def links(self) -> int:
        """Links of a node on the levels above the lowest."""
        return self._shape.upper_links

    @property
    def bytes(self) -> int:
        """Bytes of links, codes and weights, without the room for more."""
        return sum(part.nbytes for part in self._arrays.used(self._places))

    def __len__(self) -> int:
        """Rows that a search can return, about."""
        return int(np.count_nonzero(self._rows.view.live[: int(self._arrays.state[2])]))

    # -- writing

    def add(self, view: RowsView, rows: Ints, threads: int | None = None) -> None:
        """Insert rows, which the graph reads where they are."""
        if not len(rows):
            return
        heights = -np.log1p(-self._rng.random(len(rows))) / math.log(self._shape.upper_links)
        self._take_room(rows, heights.astype(np.int64).clip(max=_HIGHEST))
        laid = self._now(view)
        self._library.spillway_insert(
            laid.at, np.ascontiguousarray(rows).ctypes.data, len(rows), EF_CONSTRUCTION,
            threads or self.threads,
        )  # fmt: skip

    def _take_room(self, rows: Ints, heights: Ints) -> None:
        """Give rows their heights and places for links; where these are too few, all is copied to a larger one."""
        old, ends = self._arrays, np.cumsum(heights)
        above, places = int(rows.max()) + 1, self._places + int(ends[-1])
        if above > len(old.near) or places > len(old.upper):
            slots = len(old.near) if above <= len(old.near) else int(above * _GROWTH)
            room = len(old.upper) if places <= len(old.upper) else int(places * _GROWTH)
            new = _Arrays(self._shape, slots, room)
            for mine, theirs in zip(new.all(), old.used(self._places), strict=True):
                mine[: len(theirs)] = theirs
            self._arrays = new
            self._laid = self._lay_out()
        arrays = self._arrays
        arrays.heights[rows] = heights
        arrays.upper_at[rows] = self._places + ends - heights
        arrays.state[2] = max(int(arrays.state[2]), above)
        self._places = places

    def mark_deleted(self, rows: Ints) -> None:
        """Do nothing: the rows' live marks say it."""

    # -- searching

    def query(
        self, queries: Floats, k: int, ef: int | None = None, threads: int | None = None, *, labelled: bool = False
    ) -> tuple[Ints, Floats]:  # fmt: skip
        """Return (rows or their labels, scores), (queries, k'), best first, with k' <= k what every query found."""
        count, stored = len(queries), self._rows
        rows, scores = np.empty((count, k), _ROWS), np.empty((count, k), _SCORES)
        if not rows.size:
            return rows, scores
        laid = self._laid
        if laid.matrix is not stored.view.matrix:
            laid = self._now(stored.view)
        queries, ef, threads = (
            np.ascontiguousarray(queries, _SCORES),
            ef or self.ef,
            threads or self.threads,
        )
        made = _ref(_first(rows)), _ref(_first(scores))  # type: ignore[arg-type]
        if stored.dead:
            found = self._library.spillway_search(
                laid.at, _address(queries), count, k, ef, _SPARE, threads, labelled, *made
            )
        else:
            found = self._library.spillway_search_delayed(
                laid.at,
                _address(queries),
                count,
                k,
                ef,
                _SPARE,
                _USUAL,
                threads,
                labelled,
                *made,
                None,
            )
        return (rows, scores) if found == k else (rows[:, :found], scores[:, :found])

    def walk(self, queries: Floats, k: int, delay: Delay, ef: int | None = None) -> Walked:
        """Search as `query`, by a delay of choice; the same is found whichever threads do the work.

        ValueError if a row is deleted, or `delay` cannot be.
        """
        stored, count = self._rows, len(queries)
        if stored.dead:
            raise ValueError(f"{stored.dead} rows are deleted; expected none")
        rows, scores = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
        walked = np.zeros((count, 3), np.int64)
        settings = _settings(delay)
        if not rows.size:
            return Walked.of(rows, scores, walked)
        laid = self._now(stored.view)
        found = self._library.spillway_search_delayed(
            laid.at, _address(np.ascontiguousarray(queries, np.float32)), count, k, ef or self.ef,
            _SPARE, settings, self.threads, 0,
            _ref(_first(rows)), _ref(_first(scores)), _ref(_first(walked)),  # type: ignore[arg-type]
        )  # fmt: skip
        return Walked.of(rows[:, :found], scores[:, :found], walked)

    # -- files

    def save(self, path: str) -> None:
        """Write the graph to a file, from the thread that adds; searches go on meanwhile."""
        with Path(path).open("wb") as file:
            file.write(_MAGIC + msgspec.json.encode((self._shape, self._places)) + b"\n")
            for part in self._arrays.used(self._places):
                part.tofile(file)

    @classmethod
    def _read(cls, file: BufferedReader, metric: Metric, threads: int) -> Self:
        """Read what `save` wrote; ValueError if that is damaged. Rows are taken with `over`."""
        try:
            shape, places = msgspec.json.decode(file.readline(), type=tuple[_Shape, int])
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        state = np.fromfile(file, np.int64, 3)
        made = cls(
            VectorRows(shape.dimension, 1), metric, 1, threads,
            links=shape.upper_links, lowest_links=shape.links,
        )  # fmt: skip
        arrays = made._arrays = _Arrays(shape, int(1.25 * state[2]) + 1, int(1.25 * places) + 64)
        arrays.state[:], made._places = state, places
        for part in arrays.used(places)[1:]:
            if file.readinto(part.reshape(-1).view(np.uint8).data) != part.nbytes:
                raise ValueError(f"{file.name} ends early")
        made._laid = made._lay_out()
        return made

    @classmethod
    def _of(cls, graph: Graph, dimension: int, threads: int) -> Self | None:
        """Return what hnswlib's graph is here; None if it is too large to copy, or empty."""
        if not len(graph) or graph.copied_bytes > _MOST_COPIED_BYTES:
            return None
        layers = graph.layers()
        rows, count = layers.rows, len(layers.rows)
        made = cls(
            VectorRows(dimension, 1), graph.metric, int(1.25 * rows.max()), threads,
            links=graph.links, lowest_links=layers.near.shape[1] - 1,
        )  # fmt: skip

        def renamed(lists: Any) -> Any:
            lists[:, 0] &= 0xFFFF  # beside the count is a mark of deletion
            lists[:, 1:] = rows[np.minimum(lists[:, 1:], count - 1)]
            return lists

        made._take_room(rows, layers.heights)
        arrays, laid = made._arrays, made._laid
        arrays.near[rows] = renamed(layers.near)
        arrays.upper[: len(layers.upper)] = renamed(layers.upper)
        arrays.state[:2] = rows[layers.entry], layers.levels
        made._library.spillway_encode(
            laid.at, layers.vectors.ctypes.data, rows.ctypes.data, count, threads
        )
        return made


SearchGraph = Graph | NativeGraph


def new_graph(
    rows: VectorRows, metric: Metric, capacity: int, threads: int, links: int = FEW_LINKS
) -> SearchGraph:
    """Return an empty graph for rows, of the quickest kind that this machine can search."""
    if kernel() is None:
        return Graph(rows.dimension, metric, capacity, threads, links=links)
    return NativeGraph(rows, metric, capacity, threads, links=links)


def graph_bytes(rows: int, dimension: int) -> int:
    """Return about how many bytes a graph over so many rows takes beside them; hnswlib's holds them once more."""
    links = 4 * (2 * FEW_LINKS + 2)
    held = 4 * dimension if kernel() is None else _Shape.of(dimension, 0, 0).width
    return rows * (links + held + 16)


def load_graph(
    path: Path, dimension: int, metric: Metric, capacity: int, threads: int
) -> SearchGraph | None:
    """Load what a graph of either kind saved; None if it must be built anew here.

    RuntimeError, ValueError or OSError if the file is damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            return None if kernel() is None else NativeGraph._read(file, metric, threads)
    graph = Graph(dimension, metric, capacity, threads, path=str(path))
    return graph if kernel() is None else NativeGraph._of(graph, dimension, threads)
