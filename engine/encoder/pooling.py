"""Pooling: one vector per text from the hidden rows of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.models.encoders.spec import Pooling


def pool(
    rows: Tensor, lengths: Sequence[int], pooling: Pooling, *, normalise: bool = False
) -> Tensor:
    """Return (texts, hidden): the first row, the mean or the maximum of each text's rows, optionally at length 1.

    The texts lie one after another in `rows` (tokens, hidden).
    """
    if pooling == "cls":
        vectors = rows[[0, *accumulate(lengths[:-1])]]
    else:
        sizes = torch.tensor(lengths, device=rows.device)
        vectors = torch.segment_reduce(rows, pooling, lengths=sizes, axis=0)
    return F.normalize(vectors, dim=1) if normalise else vectors
