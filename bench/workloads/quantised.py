"""An inverted file with product quantisation in plain numpy, for the distances that a scan of one hands on.

It is no index of the product: it serves rows that ask what a selection does with such distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bench.workloads.vectors import Ids, Rows

CODES = 256
TRAINED = 64  # rows a centre is trained with, at most
ROUNDS = 8


class ScannedRows(NamedTuple):
    """What a scan met, list after list: rows of the base, and their distances by the product quantiser."""

    rows: Ids
    distances: Rows


@dataclass(frozen=True, slots=True)
class QuantisedLists:
    """Rows in lists by their nearest centre, each a code a part; distances are squares of Euclid's."""

    centres: Rows  # lists, dimension
    books: Rows  # parts, CODES, dimension / parts
    codes: Any  # rows in the order of the lists, parts
    rows: Ids  # the base's row of each code
    begins: Ids  # the first code of each list, and the end

    def nearest_lists(self, queries: Rows, probes: int) -> Ids:
        """Return the nearest lists of each query, nearest first."""
        return np.argsort(_squares(queries, self.centres), axis=1, kind="stable")[:, :probes]

    def scan(self, query: Rows, lists: Ids) -> ScannedRows:
        """Return what these lists hold, one list after the other."""
        places = np.concatenate([np.arange(*self.begins[each : each + 2]) for each in lists])
        parts = len(self.books)
        table = np.square(query.reshape(parts, 1, -1) - self.books).sum(2)
        found = table[np.arange(parts), self.codes[places]].sum(1)
        return ScannedRows(self.rows[places], found)


def quantised(base: Rows, lists: int, parts: int, rng: np.random.Generator) -> QuantisedLists:
    """Train centres and code books on the base and put its rows into the lists."""
    centres = _means(base, lists, rng)
    nearest = _nearest(base, centres)
    order = np.argsort(nearest, kind="stable")
    begins = np.searchsorted(nearest[order], np.arange(lists + 1))
    books, codes = [], []
    for part in np.split(base, parts, axis=1):
        books.append(_means(part, CODES, rng))
        codes.append(_nearest(part, books[-1])[order].astype(np.uint8))
    return QuantisedLists(centres, np.stack(books), np.stack(codes, 1), order, begins)


def _means(rows: Rows, count: int, rng: np.random.Generator) -> Rows:
    """Return k-means' centres, by Lloyd's algorithm; an empty one stays where it is."""
    some = np.ascontiguousarray(rows[rng.permutation(len(rows))[: TRAINED * count]])
    centres = some[:count].copy()
    for _ in range(ROUNDS):
        nearest = _nearest(some, centres)
        order = np.argsort(nearest, kind="stable")
        here, first, sizes = np.unique(nearest[order], return_index=True, return_counts=True)
        centres[here] = np.add.reduceat(some[order], first, axis=0) / sizes[:, None]
    return centres


def _nearest(rows: Rows, centres: Rows) -> Ids:
    parts = (rows[at : at + 4096] for at in range(0, len(rows), 4096))
    return np.concatenate([_squares(part, centres).argmin(1) for part in parts])


def _squares(rows: Rows, centres: Rows) -> Rows:
    """Return squared distances, each row's less its own square."""
    found: Rows = np.square(centres).sum(1) - 2 * (rows @ centres.T)
    return found
