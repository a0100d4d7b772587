"""Pooling: one vector per text from the hidden rows of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.models.encoders.spec import Pooling


def first_rows(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return (texts, hidden): the row of each text's first token; the texts lie one after another in `rows`."""
    return rows[[0, *accumulate(lengths[:-1])]]


def pool(rows: Tensor, lengths: Sequence[int], pooling: Pooling) -> Tensor:
    """Return (texts, hidden): of each text's rows the first, the mean or the largest values."""
    if pooling == "cls":
        return first_rows(rows, lengths)
    sizes = torch.tensor(lengths, device=rows.device)
    return torch.segment_reduce(rows, pooling, lengths=sizes, axis=0)
