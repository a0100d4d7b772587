"""`paged_attention` on CUDA, in Triton, for any positions, page tables and windows, with grouped heads.

Each program computes some rows of a sequence, the query heads that share one head of K and V, and one chunk of pages;
the results of the chunks are then merged. Triton's interpreter runs the same kernel without a GPU
(TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from common.pages.identity import PAGE
from engine.kernels.attention_plan import QueryRows, lay_out
from engine.kernels.page_memory import PageMemory
from engine.kernels.partial import Partial

CHUNK = 16  # pages
QUERIES = 64  # query heads of one program, over all its rows
_INTERPRETED = bool(
    triton.knobs.runtime.interpret
)  # the interpreter multiplies the bits of bf16 as if they were integers
_ROWS, _FROM, _TO = 1, 3, 4


class Blocks(NamedTuple):
    """The attention plan of one layer group in a step: positions of rows, slots for their K and V, blocks of rows.

    `blocks` (blocks, 5): first row, number of rows, start of the page table, first logical page, end of the logical
    pages. `longest` is the largest number of rows in a block, `chunks` the largest number of chunks. `long` marks the
    rows of long texts; None: no row.
    """

    slots: Tensor
    positions: Tensor
    tables: Tensor
    blocks: Tensor
    longest: int
    chunks: int
    long: Tensor | None


def plan_blocks(
    queries: Sequence[QueryRows],
    pools: Sequence[PageMemory],
    shared: int,
    device: torch.device | None = None,
    *,
    whole: bool = True,
) -> list[Blocks]:
    """Plan a step's attention for every layer group; `shared` query heads share one head of K and V.

    The tensors are on `device`, by default the pools' device. ValueError if positions do not rise, pages are packed,
    or, with `whole`, if a page that a row needs is missing.
    """
    if any(pool.packed for pool in pools):
        raise ValueError("Triton's kernel reads plain pages; these are packed")
    device, step = device or pools[0].data.device, lay_out(queries, pools, whole=whole)
    flat, size, found = _tensor(step.positions, device), max(1, QUERIES // shared), []
    long = None if step.long is None else torch.from_numpy(step.long).to(device)
    for group, pool in enumerate(pools):
        blocks, first = [], 0
        for end, start in zip(step.ends.tolist(), step.starts[group].tolist(), strict=False):
            for at in range(first, end, size):
                last = min(at + size, end)
                seen = 0 if pool.window is None else step.positions[at] - pool.window + 1
                low, high = max(0, int(seen)) // PAGE, int(step.positions[last - 1]) // PAGE + 1
                while not whole and low + 1 < high and step.tables[group][start + low] < 0:
                    low += 1  # a front that is attended elsewhere costs nothing here
                blocks.append((at, last - at, start, low, high))
            first = end
        chunks = max((b[_TO] - 1) // CHUNK - b[_FROM] // CHUNK + 1 for b in blocks)
        found.append(
            Blocks(
                pool.slots(_tensor(step.pages(group), device), flat % PAGE),
                flat,
                _tensor(step.tables[group].astype(np.int32), device),
                _tensor(np.array(blocks, dtype=np.int32), device),
                max(b[_ROWS] for b in blocks),
                chunks,
                long,
            )
        )
    return found


def paged_attention(q: Tensor, kv_pages: PageMemory, layer: int, plan: Blocks) -> Tensor:
    """Attend with rows (rows, heads, dim) over one layer's pages, as `reference_attention.paged_attention` does."""
    sums, row_max, row_sum = attend_partly(q, kv_pages, layer, plan)
    found = torch.empty_like(q, memory_format=torch.contiguous_format)
    rows, heads, dim = q.shape
    _merge[(rows * heads,)](
        sums, row_max, row_sum, found, plan.chunks, rows * heads, dim, WIDTH=triton.next_power_of_2(dim)
    )  # fmt: skip
    return found


def partial_attention(q: Tensor, kv_pages: PageMemory, layer: int, plan: Blocks) -> Partial:
    """Attend over the resident pages, as `reference_attention.partial_attention` does."""
    sums, row_max, row_sum = attend_partly(q, kv_pages, layer, plan)
    top = row_max.amax(0)
    weights = torch.exp(row_max - top)
    return Partial((sums * weights[..., None]).sum(0), top, (row_sum * weights).sum(0))


def attend_partly(
    q: Tensor, kv_pages: PageMemory, layer: int, plan: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 unscaled sums (chunks, rows, heads, dim), largest scores and weight sums (chunks, rows, heads)."""
    q = q.contiguous()
    rows, heads, dim = q.shape
    shared = heads // kv_pages.kv_heads
    # Not filled: every row is in one block, whose program writes each chunk, also one without pages.
    sums = torch.empty(plan.chunks, rows, heads, dim, device=q.device)
    row_max = torch.empty(plan.chunks, rows, heads, device=q.device)
    row_sum = torch.empty(plan.chunks, rows, heads, device=q.device)
    data = kv_pages.data
    _attend[(len(plan.blocks), kv_pages.kv_heads, plan.chunks)](
        q, data, plan.tables, plan.positions, plan.blocks, sums, row_max, row_sum,
        rows, layer * data.stride(1), data.stride(0), data.stride(2), kv_pages.scale,
        HEADS=heads, SHARED=shared, DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        SIZE=max(16, triton.next_power_of_2(plan.longest * shared)), PAGE_=PAGE, CHUNK_=CHUNK,
        WINDOW=kv_pages.window or 0, CAP=kv_pages.cap, WIDEN=_INTERPRETED and data.dtype == torch.bfloat16,
    )  # fmt: skip
    return sums, row_max, row_sum


@triton.jit  # type: ignore[untyped-decorator]
def _capped(scores, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """cap * tanh(x / cap)."""
    small = tl.exp(-2 * tl.abs(scores) / CAP)
    turned = CAP * (1 - small) / (1 + small)
    return tl.where(scores < 0, -turned, turned)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, pages, tables, positions, blocks, sums, row_max, row_sum, rows, layer_at, page_stride, half_stride, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    PAGE_: tl.constexpr, CHUNK_: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    block, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(blocks + block * 5)
    count = tl.load(blocks + block * 5 + 1)
    table = tl.load(blocks + block * 5 + 2)
    page_from = tl.load(blocks + block * 5 + 3)
    page_to = tl.load(blocks + block * 5 + 4)
    begin = (page_from // CHUNK_ + chunk) * CHUNK_
    low, high = tl.maximum(page_from, begin), tl.minimum(page_to, begin + CHUNK_)
    i = tl.arange(0, SIZE)
    there = i < count * SHARED
    row = first + i // SHARED
    at = row * HEADS + head * SHARED + i % SHARED
    d = tl.arange(0, WIDTH)
    inside = d < DIM
    mine = tl.load(
        q + at[:, None] * DIM + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
    )
    position = tl.load(positions + row, mask=there, other=-1)
    top = tl.full([SIZE], -1.0e30, tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    found = tl.zeros([SIZE, WIDTH], tl.float32)
    t = tl.arange(0, PAGE_)
    for page in range(low, high):
        physical = tl.load(tables + table + page)
        present = (
            physical + 0 * t >= 0
        )  # one element per token: the interpreter cannot join a scalar
        base = pages + physical.to(tl.int64) * page_stride + layer_at + head * PAGE_ * DIM
        where = t[:, None] * DIM + d[None, :]
        shown = inside[None, :] & present[:, None]
        keys = tl.load(base + where, mask=shown, other=0.0)
        values = tl.load(base + half_stride + where, mask=shown, other=0.0)
        if WIDEN:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(mine.to(keys.dtype), tl.trans(keys), input_precision="ieee") * scale
        if CAP > 0:
            scores = _capped(scores, CAP)
        token = page * PAGE_ + t
        seen = (token[None, :] <= position[:, None]) & present[None, :]
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - now[:, None])
        keep = tl.exp(top - now)
        total = total * keep + tl.sum(weights, 1)
        found = found * keep[:, None]
        found += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = now
    out = chunk * rows * HEADS + at
    tl.store(row_max + out, top, mask=there)
    tl.store(row_sum + out, total, mask=there)
    tl.store(sums + out[:, None] * DIM + d[None, :], found, mask=there[:, None] & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    sums, row_max, row_sum, found, chunks, places, dim, WIDTH: tl.constexpr
):  # fmt: skip
    """Merge the unscaled sums of all chunks of one row and head into its attention."""
    place = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < dim
    top, total = tl.load(row_max + place), tl.load(row_sum + place)
    whole = tl.load(sums + place * dim + d, mask=inside, other=0.0)
    for chunk in range(1, chunks):
        at = place + chunk * places
        its = tl.load(row_max + at)
        now = tl.maximum(top, its)
        keep, add = tl.exp(top - now), tl.exp(its - now)
        total = total * keep + tl.load(row_sum + at) * add
        whole = whole * keep + tl.load(sums + at * dim + d, mask=inside, other=0.0) * add
        top = now
    tl.store(found + place * dim + d, (whole / total).to(found.dtype.element_ty), mask=inside)


def _tensor(values: NDArray[Any], device: torch.device) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
