"""The two sides of sequences whose first pages are in another tier than the rest: their front, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from common.pages.identity import CHUNK, PAGE
from engine.kernels.attention_plan import QueryRows
from engine.kernels.page_memory import PageMemory


class SplitRows(QueryRows, Protocol):
    """One sequence's rows, which come after its `front`: the number of its first pages in the other tier."""

    @property
    def front(self) -> int:
        """The number of first pages in the other tier, whole chunks."""


class SideRows(NamedTuple):
    """One sequence's rows with the pages of one side; pages of the other side are -1."""

    positions: Sequence[int]
    pages: Sequence[Sequence[int]]
    long: bool = False


def front_sides(queries: Sequence[SplitRows], pools: Sequence[PageMemory]) -> list[SideRows]:
    """Return rows with their fronts only.

    ValueError if a front is no number of whole chunks, or has a missing page, or if layers of the `pools` have windows.
    """
    _check_pools(pools)
    for index, rows in enumerate(queries):
        _check(index, rows, [table[: rows.front] for table in rows.pages])
    return [
        SideRows(
            rows.positions,
            [[*table[: rows.front], *([-1] * (len(table) - rows.front))] for table in rows.pages],
            rows.long,
        )
        for rows in queries
    ]


def rest_sides(queries: Sequence[SplitRows], pools: Sequence[PageMemory]) -> list[SideRows]:
    """Return rows with the pages after their fronts; ValueError as for `front_sides`, or if a row lies in a front."""
    _check_pools(pools)
    for index, rows in enumerate(queries):
        if rows.positions[0] < rows.front * PAGE:
            raise ValueError(
                f"sequence {index}: position {rows.positions[0]} lies in its front of {rows.front} pages"
            )
        end = rows.positions[-1] // PAGE + 1
        _check(index, rows, [table[rows.front : end] for table in rows.pages])
    return [
        SideRows(
            rows.positions,
            [[*([-1] * rows.front), *table[rows.front :]] for table in rows.pages],
            rows.long,
        )
        for rows in queries
    ]


def _check_pools(pools: Sequence[PageMemory]) -> None:
    if any(pool.window is not None for pool in pools):
        raise ValueError("sequences of models whose layers have windows have no fronts")


def _check(index: int, rows: SplitRows, sides: Sequence[Sequence[int]]) -> None:
    if rows.front <= 0 or rows.front % CHUNK:
        raise ValueError(
            f"sequence {index}: a front of {rows.front} pages; expected a multiple of {CHUNK} above 0"
        )
    for group, side in enumerate(sides):
        if not side or min(side) < 0:
            raise ValueError(f"sequence {index}: a page of group {group} is not resident")
