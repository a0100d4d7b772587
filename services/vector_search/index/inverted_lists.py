"""Inverted lists of codes over a shard's rows: a search scores the codes of the nearest lists, then the best exactly.

Codes are in memory; of the rows, which may lie on the disk, only those are read that the codes rank best. A kernel
scans; without it numpy does the same, slowly.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from common.native.finder import open_first
from services.vector_search.index import code_blocks, exact
from services.vector_search.index.code_blocks import BLOCK
from services.vector_search.index.native.sources import SCAN_LISTS, SCAN_LISTS_AVX2
from services.vector_search.index.quantizer import (
    Bytes,
    CodeBits,
    Quantizer,
    subspaces_of,
    words_of,
)
from services.vector_search.index.rows import Flags, Floats, Ints, RowsView

_MAGIC = b"spillway lists 1\n"
_METRICS = {"dot": 0, "cosine": 1, "l2": 2}
# The largest depth.
MOST_DEPTH = 64
# Rows that are coded, and that are given other numbers, at once.
_AT_ONCE, _MOVED_AT_ONCE = 4096, 1 << 17
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Layout(ctypes.Structure):
    """`Lists` of scan_lists.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("dimension", "width", "subspaces", "part", "lists", "metric")),
        ("entries", _INT),
        *((name, _POINTER) for name in ("rotation", "centroids", "halves", "words")),
        *((name, _POINTER) for name in ("starts", "codes", "rows", "norms")),
    )


@cache
def kernel() -> Any:
    """Return the kernel, or None where it is not built or this processor cannot run it."""
    library = open_first([SCAN_LISTS, SCAN_LISTS_AVX2])
    return None if library is None else declared(library)


def declared(library: Any) -> Any:
    """Return a library of the kernel with the types of its functions declared."""
    scan, candidates = library.spillway_scan_lists, library.spillway_list_candidates
    scan.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, *[_INT] * 5, *[_POINTER] * 3]
    candidates.argtypes = [_POINTER, _POINTER, _POINTER, *[_INT] * 4, *[_POINTER] * 3]
    library.spillway_nearest_lists.argtypes = [_POINTER, _POINTER, _INT, _INT, _POINTER]
    scan.restype = candidates.restype = library.spillway_nearest_lists.restype = None
    return library


class Coded(NamedTuple):
    """Rows as a quantizer codes them: of each its number, its list and its code (n, subspaces)."""

    rows: Ints
    lists: Ints
    codes: Bytes


class FoundRows(NamedTuple):
    """The rows found for each query, best first, and their scores, as (queries, most).

    Of each query there are `found`; the others are row -1 and score -inf.
    """

    rows: Ints
    scores: Floats
    found: Ints


class _Header(msgspec.Struct, frozen=True):
    """What saved lists begin with: bytes of the quantizer, rows that are covered, and how they are read."""

    quantizer: int
    covered: int
    probes: int
    depth: int


class _Packed(NamedTuple):
    """The rows and codes of all lists, in blocks of 64: `rows` (blocks, 64), -1 where there is none, `codes` as
    `code_blocks` lays them out and, but for dot products, `norms` (blocks, 64). List i has `sizes[i]` rows from block
    `starts[i]`.
    """

    sizes: Ints
    starts: Ints
    rows: np.ndarray[Any, np.dtype[np.int32]]
    codes: Bytes
    norms: Floats | None

    @classmethod
    def room(cls, sizes: Ints, quantizer: Quantizer) -> Self:
        """Return room for lists of so many rows, without any."""
        starts = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK))]).astype(np.int64)
        blocks = int(starts[-1])
        return cls(
            sizes,
            starts,
            np.full((blocks, BLOCK), -1, np.int32),
            code_blocks.blocks_of(blocks, quantizer.subspaces, quantizer.code_bits),
            np.zeros((blocks, BLOCK), np.float32) if quantizer.metric != "dot" else None,
        )

    def arrays(self) -> list[Any]:
        """Return what is saved, in order; the starts follow from the sizes."""
        return [self.sizes, self.rows, self.codes, *([] if self.norms is None else [self.norms])]

    def joined(self, more: Coded, quantizer: Quantizer) -> Self:
        """Return these lists with more rows at their ends."""
        added = np.bincount(more.lists, minlength=len(self.sizes))
        made = self.room(self.sizes + added, quantizer)
        old = np.diff(self.starts)
        moved = np.arange(len(self.rows)) + np.repeat(made.starts[:-1] - self.starts[:-1], old)
        made.rows[moved], made.codes[moved] = self.rows, self.codes
        order = np.argsort(more.lists, kind="stable")
        lists, rows, codes = more.lists[order], more.rows[order], more.codes[order]
        at = self.sizes[lists] + np.arange(len(order)) - (np.cumsum(added) - added)[lists]
        block, slot = made.starts[lists] + at // BLOCK, at % BLOCK
        made.rows[block, slot] = rows
        code_blocks.put(made.codes, block, slot, codes)
        if made.norms is not None and self.norms is not None:
            made.norms[moved] = self.norms
            stands = quantizer.decoded(lists, codes)
            made.norms[block, slot] = 0.5 * np.einsum("nd,nd->n", stands, stands)
        return made

    def coded(self, first: int, end: int) -> Coded:
        """Return the rows and codes of the lists from `first` to before `end`."""
        blocks = slice(int(self.starts[first]), int(self.starts[end]))
        taken = self.rows[blocks] >= 0
        lists = np.repeat(np.arange(first, end), self.sizes[first:end])
        codes = code_blocks.taken(self.codes[blocks])[taken]
        return Coded(self.rows[blocks][taken].astype(np.int64), lists, codes)


def lists_bytes(rows: int, dimension: int, lists: int, bits: CodeBits = 8) -> int:
    """Return about how many bytes lists over so many rows take beside them."""
    subspaces, part = subspaces_of(dimension, bits)
    slots = rows + lists * BLOCK // 2
    width = subspaces * part
    return slots * (subspaces * bits // 8 + 8) + 4 * width * (lists + dimension + words_of(bits))


class InvertedLists:
    """Lists over the first `covered` rows of a shard; they never change, `with_more` makes new ones.

    `probes` is how many lists a search reads, `depth` how many rows it then compares exactly for each that it returns.
    """

    def __init__(
        self, quantizer: Quantizer, packed: _Packed, covered: int, *, probes: int, depth: int
    ) -> None:
        self.quantizer, self._packed, self.covered = quantizer, packed, covered
        self.probes, self.depth = min(probes, quantizer.lists), depth
        self._words = np.ascontiguousarray(quantizer.words.transpose(0, 2, 1))
        self._layout = self._lay_out()

    @classmethod
    def empty(cls, quantizer: Quantizer) -> Self:
        """Return lists without rows."""
        packed = _Packed.room(np.zeros(quantizer.lists, np.int64), quantizer)
        return cls(quantizer, packed, 0, probes=quantizer.lists, depth=1)

    def _lay_out(self) -> _Layout:
        q, packed = self.quantizer, self._packed
        arrays = (
            q.centroids,
            q.halves,
            self._words,
            packed.starts,
            packed.codes,
            packed.rows,
        )
        return _Layout(
            q.dimension, q.width, q.subspaces, q.words.shape[2], q.lists, _METRICS[q.metric], q.words.shape[1],
            q.rotation.ctypes.data if q.rotates else None, *(array.ctypes.data for array in arrays),
            None if packed.norms is None else packed.norms.ctypes.data,
        )  # fmt: skip

    @property
    def sizes(self) -> Ints:
        """Rows of each list."""
        return self._packed.sizes

    @property
    def codes_bytes(self) -> int:
        """Bytes of the codes, and of what lies beside each."""
        return sum(array.nbytes for array in self._packed.arrays()[1:])

    @property
    def quantizer_bytes(self) -> int:
        """Bytes of the quantizer and of what is made of it."""
        q = self.quantizer
        return q.nbytes + q.halves.nbytes + self._words.nbytes

    @property
    def unevenness(self) -> float:
        """How many times as many codes a search reads as if the lists were equally long, at least 1.

        Queries come as rows do, to a list of n rows n times as often as to one of one row (chapter 6 of the thesis
        arXiv 2508.08469).
        """
        count = int(self.sizes.sum())
        return (
            float(len(self.sizes) * (self.sizes.astype(np.float64) ** 2).sum() / count**2)
            if count
            else 1.0
        )

    def codes_read(self, probes: int) -> float:
        """Return how many codes a query that reads so many lists is expected to score."""
        count = int(self.sizes.sum())
        return min(probes * self.unevenness * count / max(len(self.sizes), 1), float(count))

    def tuned(self, probes: int, depth: int) -> Self:
        """Return the same lists, read otherwise."""
        return type(self)(self.quantizer, self._packed, self.covered, probes=probes, depth=depth)

    def depth_of(self, probes: int) -> int:
        """Return the depth of a search that reads so many lists: one that reads more also compares more."""
        return max(self.depth, min(-(-self.depth * probes // self.probes), MOST_DEPTH))

    def list_of_rows(self) -> Ints:
        """Return the list of each covered row, -1 where a row is in none."""
        found = np.full(self.covered, -1, np.int64)
        packed = self._packed
        taken = packed.rows >= 0
        found[packed.rows[taken]] = np.repeat(np.arange(len(packed.sizes)), packed.sizes)
        return found

    # -- searching

    def query(
        self,
        view: RowsView,
        keep: Flags,
        queries: Floats,
        k: int,
        *,
        probes: int,
        compared: int,
        threads: int,
    ) -> FoundRows:
        """Find the k best of the rows that `keep` marks, scored exactly, in the `probes` nearest lists of each query.

        The `compared` best by their codes are scored.
        """
        made = _empty(len(queries), k)
        library = kernel()
        if library is None:
            return self._by_numpy(view, keep, queries, made, probes, compared)
        queries = np.ascontiguousarray(queries, np.float32)
        library.spillway_scan_lists(
            ctypes.addressof(self._layout), view.matrix.ctypes.data, keep.ctypes.data,
            queries.ctypes.data, len(queries), k, probes, compared, threads,
            *(array.ctypes.data for array in made),
        )  # fmt: skip
        return made

    def candidates(
        self, keep: Flags, queries: Floats, most: int, *, probes: int, threads: int
    ) -> FoundRows:
        """Return the best of the rows that `keep` marks by their codes alone, in the `probes` nearest lists."""
        made = _empty(len(queries), most)
        library = kernel()
        if library is None:
            for i, (rows, scores) in enumerate(self._scanned(keep, queries, probes)):
                best = np.argsort(-scores, kind="stable")[:most]
                _put(made, i, rows[best], scores[best])
            return made
        queries = np.ascontiguousarray(queries, np.float32)
        library.spillway_list_candidates(
            ctypes.addressof(self._layout), keep.ctypes.data, queries.ctypes.data,
            len(queries), most, probes, threads, *(array.ctypes.data for array in made),
        )  # fmt: skip
        return made

    def nearest_lists(self, queries: Floats) -> Ints:
        """Return the lists of each query, (queries, lists), the nearest first."""
        products = self.quantizer.rotated(queries) @ self.quantizer.centroids.T
        return self._order(products)

    def scanned(self, queries: Floats, probes: int) -> Ints:
        """Return the lists that a search of each query reads, (queries, probes), the nearest first."""
        library = kernel()
        if library is None:
            return self.nearest_lists(queries)[:, :probes]
        queries = np.ascontiguousarray(queries, np.float32)
        found = np.empty((len(queries), min(probes, self.quantizer.lists)), np.int64)
        library.spillway_nearest_lists(
            ctypes.addressof(self._layout), queries.ctypes.data, *found.shape, found.ctypes.data
        )
        return found

    def _order(self, products: Floats) -> Ints:
        if self.quantizer.metric != "dot":
            products = products - self.quantizer.halves
        order: Ints = np.argsort(-products, axis=1, kind="stable")
        return order

    def _scanned(self, keep: Flags, queries: Floats, probes: int) -> Any:
        """Yield, for each query, the rows of its nearest lists and their scores by the codes."""
        q, packed = self.quantizer, self._packed
        rotated = q.rotated(queries)
        products = rotated @ q.centroids.T
        for own, product, order in zip(rotated, products, self._order(products), strict=True):
            tables = np.einsum("jwd,jd->jw", q.words, own.reshape(q.subspaces, -1))
            chosen = order[:probes]
            blocks = np.concatenate([np.arange(*packed.starts[i : i + 2]) for i in chosen])
            codes = code_blocks.taken(packed.codes[blocks])
            scores = tables[np.arange(q.subspaces), codes].sum(axis=2)
            counts = packed.starts[chosen + 1] - packed.starts[chosen]
            scores += np.repeat(product[chosen], counts)[:, None]
            if packed.norms is not None:
                scores -= packed.norms[blocks]
            rows = packed.rows[blocks]
            taken = (rows >= 0) & keep[rows]
            yield rows[taken].astype(np.int64), scores[taken].astype(np.float32)

    def _by_numpy(
        self, view: RowsView, keep: Flags, queries: Floats, made: FoundRows, probes: int, most: int
    ) -> FoundRows:
        k = made.rows.shape[1]
        for i, (rows, rough) in enumerate(self._scanned(keep, queries, probes)):
            best = np.argsort(-rough, kind="stable")[:most]
            rows = np.sort(rows[best])  # noqa: PLW2901 - in the order in which they lie on the disk
            scores = exact.score(
                queries[i : i + 1], view.matrix[rows][None], self.quantizer.metric
            )[0]
            best = np.argsort(-scores, kind="stable")[:k]
            _put(made, i, rows[best], scores[best])
        return made

    # -- other lists

    def with_more(self, more: Coded, covered: int) -> Self:
        """Return lists over more rows, coded by the same quantizer."""
        packed = self._packed.joined(more, self.quantizer)
        return type(self)(self.quantizer, packed, covered, probes=self.probes, depth=self.depth)

    def renumbered(self, kept: Ints) -> Self:
        """Return the lists over rows of which only `kept`, rising, are left."""
        place = np.full(self.covered, -1, np.int64)
        within = kept[kept < self.covered]
        place[within] = np.arange(len(within))
        packed = _Packed.room(np.zeros_like(self.sizes), self.quantizer)
        count = len(self.sizes)
        some = max(1, count * _MOVED_AT_ONCE // max(int(self.sizes.sum()), 1))
        for first in range(0, count, some):
            old = self._packed.coded(first, min(first + some, count))
            moved = place[old.rows]
            here = moved >= 0
            packed = packed.joined(
                Coded(moved[here], old.lists[here], old.codes[here]), self.quantizer
            )
        return type(self)(self.quantizer, packed, len(within), probes=self.probes, depth=self.depth)

    # -- files

    def save(self, path: str) -> None:
        """Write the lists and their quantizer to a file."""
        quantizer = self.quantizer.to_bytes()
        header = _Header(len(quantizer), self.covered, self.probes, self.depth)
        with Path(path).open("wb") as file:
            file.write(_MAGIC + msgspec.json.encode(header) + b"\n" + quantizer)
            for array in self._packed.arrays():
                array.tofile(file)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; ValueError or OSError if it is damaged."""
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"{path.name} holds no lists")
            try:
                header = msgspec.json.decode(file.readline(), type=_Header)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path.name}: {error}") from error
            quantizer = Quantizer.from_bytes(file.read(header.quantizer))
            sizes = np.fromfile(file, np.int64, quantizer.lists)
            if (
                len(sizes) != quantizer.lists
                or not 0 <= sizes.min() <= sizes.sum() <= header.covered
            ):
                raise ValueError(f"{path.name} has damaged lists")
            packed = _Packed.room(sizes, quantizer)
            for array in packed.arrays()[1:]:
                if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                    raise ValueError(f"{path.name} ends early")
        if not ((packed.rows >= -1) & (packed.rows < header.covered)).all():
            raise ValueError(f"{path.name} names rows that it does not cover")
        return cls(quantizer, packed, header.covered, probes=header.probes, depth=header.depth)


def code(quantizer: Quantizer, view: RowsView, rows: Ints) -> Coded:
    """Code rows of a shard."""
    lists, codes = (
        np.empty(len(rows), np.int64),
        np.empty((len(rows), quantizer.subspaces), np.uint8),
    )
    for at in range(0, len(rows), _AT_ONCE):
        part = slice(at, at + _AT_ONCE)
        rotated = quantizer.rotated(view.matrix[rows[part]])
        lists[part] = quantizer.nearest_lists(rotated)
        codes[part] = quantizer.codes(quantizer.residuals(rotated, lists[part]))
    return Coded(rows, lists, codes)


def _empty(queries: int, most: int) -> FoundRows:
    return FoundRows(
        np.full((queries, most), -1, np.int64),
        np.full((queries, most), -np.inf, np.float32),
        np.zeros(queries, np.int64),
    )


def _put(made: FoundRows, i: int, rows: Ints, scores: Floats) -> None:
    made.rows[i, : len(rows)], made.scores[i, : len(rows)], made.found[i] = rows, scores, len(rows)
