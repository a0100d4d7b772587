"""Operations on rows of a step on CUDA, one Triton kernel each: RMS norm, rotation, writing of keys and values.

torch needs five to eight kernels for each of them, and a decode step of a few rows takes as long as its launches. All
round as torch's do, to the type of the activations after each operation. Triton's interpreter runs them without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.page_memory import PageMemory


def rms_norm(
    rows: Tensor, weight: Tensor, *, epsilon: float, offset: float, rounds_before: bool
) -> Tensor:
    """Return the RMS norm in fp32 of (rows, size) or (rows, heads, size), times `offset` + `weight` (size,).

    The last two dimensions must lie together. `rounds_before` rounds before the weight, and takes no offset.
    """
    size, heads = rows.shape[-1], rows.shape[1] if rows.dim() == 3 else 1
    found = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _norm[(len(rows) * heads,)](
        rows, weight, found, heads, rows.stride(0), size, epsilon, offset,
        BEFORE=rounds_before, WIDTH=triton.next_power_of_2(size),
    )  # fmt: skip
    return found


def rotate(rows: Tensor, rotation: Tensor) -> Tensor:
    """Rotate (rows, heads, dim) by `angles`, as `rotary.rotate` does; the last two dimensions must lie together."""
    _, heads, dim = rows.shape
    found = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _rotate[(len(rows), heads)](
        rows, rotation, found, heads, rows.stride(0), rotation.stride(0), dim, rotation.shape[-1],
        ROUND=rows.dtype != torch.float32, WIDTH=triton.next_power_of_2(dim),
    )  # fmt: skip
    return found


def write_pages(pool: PageMemory, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values (rows, kv heads, dim) in a layer of plain pages, as `PageMemory.write` does."""
    count, kv_heads, dim = keys.shape
    half = pool.data.stride(2)  # from a page's keys to its values
    _write[(count, kv_heads)](
        keys, values, slots, pool.data, kv_heads, keys.stride(0), values.stride(0),
        layer * 2 * half, half, dim, WIDTH=triton.next_power_of_2(dim),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    rows, weight, found, heads, stride, size, epsilon, offset, BEFORE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    row, head = place // heads, place % heads
    d = tl.arange(0, WIDTH)
    inside = d < size
    mine = tl.load(rows + row.to(tl.int64) * stride + head * size + d, mask=inside, other=0.0)
    factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    wide = mine.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    if BEFORE:  # noqa: SIM108 - Triton drops the other branch
        out = factor * wide.to(mine.dtype).to(tl.float32)
    else:
        out = wide * (offset + factor)
    tl.store(found + place.to(tl.int64) * size + d, out.to(mine.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    rows, rotation, found, heads, stride, sines, dim, turned, ROUND: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    inside, turning = d < dim, d < turned
    half = turned // 2
    at = rows + row * stride + head * dim
    mine = tl.load(at + d, mask=inside, other=0.0)
    pair = tl.where(d < half, d + half, d - half)
    other = tl.load(at + pair, mask=turning, other=0.0).to(tl.float32)
    angle = rotation + row * turned + d
    cosine = tl.load(angle, mask=turning, other=1.0).to(tl.float32)
    sine = tl.load(angle + sines, mask=turning, other=0.0).to(tl.float32)
    kept, swapped = mine.to(tl.float32) * cosine, tl.where(d < half, -other, other) * sine
    if ROUND:
        kept, swapped = kept.to(mine.dtype).to(tl.float32), swapped.to(mine.dtype).to(tl.float32)
    out = (kept + swapped).to(mine.dtype)
    tl.store(found + (row * heads + head) * dim + d, out, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    keys, values, slots, pages, kv_heads, key_stride, value_stride, layer_at, half, dim, WIDTH: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    inside = d < dim
    there = pages + tl.load(slots + row * kv_heads + head).to(tl.int64) * dim + layer_at + d
    tl.store(there, tl.load(keys + row * key_stride + head * dim + d, mask=inside), mask=inside)
    tl.store(
        there + half,
        tl.load(values + row * value_stride + head * dim + d, mask=inside),
        mask=inside,
    )
