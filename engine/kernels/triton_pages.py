"""Copies of many pages between the host's pinned memory and a CUDA device, one Triton kernel a layer.

The kernel reads or writes the host's memory over PCIe itself, so that a page costs no launch of its own: page by page
most of the time went to launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # 32-bit words that one program copies


def gather(pages: Tensor, ids: Tensor, layer: int, found: Tensor) -> None:
    """Copy one layer of the pages `ids` from a pool's tensor (pages, layers, …) to `found` (ids, …)."""
    _copy_pages(pages, ids, layer, found, into=False)


def scatter(pages: Tensor, ids: Tensor, layer: int, found: Tensor) -> None:
    """Copy `found` (ids, …) to one layer of the pages `ids` of a pool's tensor (pages, layers, …)."""
    _copy_pages(pages, ids, layer, found, into=True)


def _copy_pages(pages: Tensor, ids: Tensor, layer: int, found: Tensor, *, into: bool) -> None:
    pool, flat = pages.view(torch.int32), found.view(torch.int32)
    size = flat[0].numel()
    _copy[(len(ids), triton.cdiv(size, WORDS))](
        pool, ids, flat, layer * pool.stride(1), pool.stride(0), size, INTO=into, WORDS_=WORDS
    )


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    pool, ids, flat, layer_at, page_stride, size, INTO: tl.constexpr, WORDS_: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    w = tl.program_id(1) * WORDS_ + tl.arange(0, WORDS_)
    inside = w < size
    page = pool + tl.load(ids + place).to(tl.int64) * page_stride + layer_at + w
    mine = flat + place.to(tl.int64) * size + w
    if INTO:
        tl.store(page, tl.load(mine, mask=inside), mask=inside)
    else:
        tl.store(mine, tl.load(page, mask=inside), mask=inside)
