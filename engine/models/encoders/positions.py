"""Positions of tokens in the position table, counted by BERT's or RoBERTa's rule."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.encoders.spec import EncoderSpec


def positions(spec: EncoderSpec, ids: Tensor, starts: Tensor) -> Tensor:
    """Return the rows of the position table for ids (tokens,) of texts that begin at `starts` (texts + 1,).

    RoBERTa counts from the padding token's id + 1. A padding token inside a text is not counted, and has a row of its
    own.
    """
    begins, lengths = starts[:-1], starts.diff()
    offset = spec.position_offset
    places = torch.arange(offset, offset + len(ids)) - begins.repeat_interleave(lengths)
    if not offset:
        return places
    padded = ids == offset - 1
    if not padded.any():
        return places
    before = torch.cat((padded.new_zeros(1, dtype=torch.long), padded.cumsum(0)))
    within = before[1:] - before[begins].repeat_interleave(lengths)
    return torch.where(padded, offset - 1, places - within)
