"""The plan of one step's attention: which rows attend to which pages, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.pages.identity import PAGE
from engine.kernels.page_memory import PageMemory

Ints = NDArray[np.int64]
BLOCK_ROWS = 256  # query rows of one sequence that share one mask
PADDING = 1.25  # padding may raise the pages that a batch of decode rows reads by this factor


class QueryRows(Protocol):
    """One sequence's rows: rising positions, and per layer group the physical page of each logical page."""

    @property
    def positions(self) -> Sequence[int]:
        """Absolute positions of the rows."""

    @property
    def pages(self) -> Sequence[Sequence[int]]:
        """Per layer group: page ids by logical page; -1 if the page is not resident."""

    @property
    def long(self) -> bool:
        """True if the text exceeds the model's short context: its rows are rotated by the long frequencies."""


class AttentionPart(NamedTuple):
    """Attention of `sequences` x `length` rows over the same number of tokens each.

    `rows` are indices of the query rows, sequence by sequence; `blocks` are indices for `PageMemory.read`; `mask`
    (sequences * kv heads or 1, 1, length, tokens) is 0 where a row sees a token and minus infinity elsewhere.
    """

    sequences: int
    length: int
    rows: Tensor
    blocks: Tensor
    mask: Tensor


class GroupPlan(NamedTuple):
    """The attention plan of one layer group in a step: positions of rows, slots for their K and V, and attention parts.

    `long` marks the rows of long texts; None: no row.
    """

    slots: Tensor
    positions: Tensor
    parts: list[AttentionPart]
    long: Tensor | None


class Layout(NamedTuple):
    """A step's rows, sequence after sequence: their positions, where each sequence's rows end, and its pages per group.

    A group's page tables lie one after another in `tables[group]`; a sequence's table begins at
    `starts[group][sequence]`. `long` marks the rows of long texts; None: no row.
    """

    positions: Ints
    ends: Ints
    tables: list[Ints]
    starts: list[Ints]
    long: NDArray[np.bool_] | None

    def pages(self, group: int) -> Ints:
        """Return the physical page of every row."""
        begin = np.repeat(self.starts[group][:-1], np.diff(self.ends, prepend=0))
        found: Ints = self.tables[group][begin + self.positions // PAGE]
        return found


def lay_out(
    queries: Sequence[QueryRows],
    pools: Sequence[PageMemory],
    *,
    whole: bool = True,
    reach: int = 0,
) -> Layout:
    """Return the rows and page tables of a step's sequences, joined.

    ValueError if positions do not rise or a page does not exist; with `whole` also if a page is not resident that a row
    sees, or that one of the `reach` rows after a sequence's last row would see.
    """
    for index, query in enumerate(queries):
        if not _rises(query.positions):
            raise ValueError(f"sequence {index}: positions must rise from 0 or more")
        for group, pool in enumerate(pools):
            _check_pages(index, query, group, pool, whole=whole, reach=reach)
    ends = np.cumsum([len(query.positions) for query in queries])
    tables = [_joined(query.pages[group] for query in queries) for group in range(len(pools))]
    starts = [
        np.cumsum([0, *(len(query.pages[group]) for query in queries)])
        for group in range(len(pools))
    ]
    positions, long = _joined(query.positions for query in queries), None
    if any(query.long for query in queries):
        counts = [len(query.positions) for query in queries]
        long = np.repeat([query.long for query in queries], counts)
    return Layout(positions, ends, tables, starts, long)


def _joined(lists: Iterable[Sequence[int]]) -> Ints:
    return np.array(list(chain.from_iterable(lists)), dtype=np.int64)


def _rises(positions: Sequence[int]) -> bool:
    return len(positions) > 0 and positions[0] >= 0 and all(a < b for a, b in pairwise(positions))


def _check_pages(
    index: int, query: QueryRows, group: int, pool: PageMemory, *, whole: bool, reach: int
) -> None:
    """Raise ValueError unless every page a row sees is resident and exists."""
    # Plain lists: a step has few sequences, for which a single numpy call would take longer than this loop.
    positions, table = query.positions, query.pages[group]
    if (last := positions[-1] + reach) // PAGE >= len(table):
        raise ValueError(
            f"sequence {index}: position {last} has no page in group {group} of {len(table)}"
        )
    if (page := max(table)) >= pool.pages:
        raise ValueError(f"sequence {index}: page {page} of group {group} does not exist")
    if not whole or min(table) >= 0:
        return
    for position in (*positions, *range(positions[-1] + 1, last + 1)):
        first = 0 if pool.window is None else max(position - pool.window + 1, 0) // PAGE
        if min(table[first : position // PAGE + 1]) < 0:
            raise ValueError(
                f"sequence {index}: position {position} sees a page of group {group} that is not resident"
            )


def plan_groups(
    queries: Sequence[QueryRows],
    pools: Sequence[PageMemory],
    _shared: int = 1,
    *,
    whole: bool = True,
) -> list[GroupPlan]:
    """Plan a step's attention to resident pages.

    ValueError if positions do not rise, or, with `whole`, if a page that a row needs is missing.
    """
    device, step = pools[0].data.device, lay_out(queries, pools, whole=whole)
    positions = np.split(step.positions, step.ends[:-1])
    flat, groups = _tensor(step.positions, device), []
    long = None if step.long is None else torch.from_numpy(step.long).to(device)
    for group, pool in enumerate(pools):
        tables = np.split(step.tables[group], step.starts[group][1:-1])
        parts = _parts(positions, step.ends.tolist(), tables, pool, pool.data.dtype)
        slots = pool.slots(_tensor(step.pages(group), device), flat % PAGE)
        groups.append(GroupPlan(slots, flat, parts, long))
    return groups


def _parts(
    positions: list[Ints], ends: list[int], tables: list[Ints], pool: PageMemory, dtype: torch.dtype
) -> list[AttentionPart]:
    single: list[tuple[int, int, Ints]] = []  # row, position, logical pages
    parts = []
    for each, end, table in zip(positions, ends, tables, strict=True):
        start = end - len(each)
        if len(each) == 1:
            single.append((start, int(each[0]), _seen(each, table, pool.window)))
            continue
        for at in range(0, len(each), BLOCK_ROWS):
            some = each[at : at + BLOCK_ROWS]
            logical = _seen(some, table, pool.window)
            mask = _mask(some[:, None], _keys(logical)[None, :], pool.window)
            rows = np.arange(start + at, start + at + len(some))
            parts.append(_part(rows, 1, table[logical][None, :], mask[None], pool, dtype))
    by_row = {end - 1: table for end, table in zip(ends, tables, strict=True)}
    for chosen in _similar(single):
        longest = max(len(logical) for _, _, logical in chosen)
        pages = np.zeros((len(chosen), longest), dtype=np.int64)
        # Padding repeats the row's own first page, at positions after every row's position, so the mask hides it.
        logical = np.full((len(chosen), longest), 1 << 40, dtype=np.int64)
        for n, (row, _, seen) in enumerate(chosen):
            pages[n] = by_row[row][seen[0]]
            pages[n, : len(seen)] = by_row[row][seen]
            logical[n, : len(seen)] = seen
        keys = (logical[:, :, None] * PAGE + np.arange(PAGE)).reshape(len(chosen), 1, -1)
        own = np.array([position for _, position, _ in chosen])
        mask = _mask(own[:, None, None], keys, pool.window)
        rows = np.array([row for row, _, _ in chosen])
        parts.append(_part(rows, len(chosen), pages, mask, pool, dtype))
    return parts


def _seen(positions: Ints, table: Ints, window: int | None) -> Ints:
    """Return the resident logical pages that any of these rows may see."""
    first = 0 if window is None else max(0, int(positions[0]) - window + 1) // PAGE
    logical = np.arange(first, int(positions[-1]) // PAGE + 1)
    return logical[table[logical] >= 0]


def _keys(logical: Ints) -> Ints:
    return (logical[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def _mask(rows: Ints, keys: Ints, window: int | None) -> NDArray[np.bool_]:
    """Return True where a row at one position sees a token at another."""
    seen: NDArray[np.bool_] = keys <= rows
    return seen if window is None else seen & (keys > rows - window)


def _similar(single: list[tuple[int, int, Ints]]) -> list[list[tuple[int, int, Ints]]]:
    """Split rows into batches with similar numbers of pages, so that little padding is read."""
    batches: list[list[tuple[int, int, Ints]]] = []
    used = 0
    for each in sorted(single, key=lambda item: len(item[2]), reverse=True):
        size = len(each[2])
        if batches:
            longest = len(batches[-1][0][2])
            if longest * (len(batches[-1]) + 1) <= PADDING * (used + size) or longest - size <= 1:
                batches[-1].append(each)
                used += size
                continue
        batches.append([each])
        used = size
    return batches


def _part(
    rows: Ints,
    sequences: int,
    pages: Ints,
    seen: NDArray[np.bool_],
    pool: PageMemory,
    dtype: torch.dtype,
) -> AttentionPart:
    device = pool.data.device
    visible = torch.from_numpy(seen).to(device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    mask.masked_fill_(~visible, float("-inf"))
    if sequences > 1:
        mask = mask.repeat_interleave(pool.kv_heads, dim=0)
    return AttentionPart(
        sequences=sequences,
        length=seen.shape[1],
        rows=_tensor(rows, device),
        blocks=pool.blocks(_tensor(pages, device)),
        mask=mask[:, None],
    )


def _tensor(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
