"""The rows that a filter allows, kept for the filters asked last while neither rows nor filters change."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from services.vector_search.index.rows import Flags, Ints, RowsView, VectorRows

_KEPT = 4  # filters: each holds a byte for every row, and eight for every row that it allows


class AllowedRows:
    """The rows of one moment that live and that a filter allows: a flag for each row, and how many there are."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.count = int(np.count_nonzero(flags))

    @cached_property
    def numbers(self) -> Ints:
        """Return the rows' numbers, rising."""
        return np.flatnonzero(self.flags)


class _Kept(NamedTuple):
    view: RowsView
    changes: int
    wanted: Flags
    allowed: AllowedRows


class AllowedRowsCache:
    """Finds the rows that a filter allows; any number of threads may ask."""

    def __init__(self) -> None:
        self._kept: tuple[_Kept, ...] = ()

    def of(self, rows: VectorRows, view: RowsView, wanted: Flags) -> AllowedRows:
        """Return the live rows of a view of `rows` that a filter allows; `wanted` is a flag per document number."""
        changes = (
            rows.changes
        )  # read before the flags: those of a row that dies meanwhile are not used again
        for kept in self._kept:
            if kept.view is view and kept.changes == changes and kept.wanted is wanted:
                return kept.allowed
        allowed = AllowedRows(_flags(view, wanted))
        self._kept = (_Kept(view, changes, wanted, allowed), *self._kept[: _KEPT - 1])
        return allowed


def _flags(view: RowsView, wanted: Flags) -> Flags:
    numbers = view.numbers[: view.size]
    allowed = wanted[np.minimum(numbers, len(wanted) - 1)] & (numbers < len(wanted))
    allowed &= view.live[: view.size]
    return allowed
