"""Attention over some of the pages that rows see, to be merged with attention over the other pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some pages: unscaled sums (rows, heads, dim), largest score and weight sum (rows, heads)."""

    sums: Tensor
    row_max: Tensor
    row_sum: Tensor

    def result(self) -> Tensor:
        """Return the attention (rows, heads, dim), if these are all pages."""
        return self.sums / self.row_sum[..., None]


def merge(one: Partial, other: Partial) -> Partial:
    """Return the attention over the pages of both results, exact up to the rounding of fp32."""
    row_max = torch.maximum(one.row_max, other.row_max)
    mine, its = torch.exp(one.row_max - row_max), torch.exp(other.row_max - row_max)
    sums = one.sums * mine[..., None] + other.sums * its[..., None]
    return Partial(sums, row_max, one.row_sum * mine + other.row_sum * its)
