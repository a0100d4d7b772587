"""The shape and conventions of an encoder, whatever its family; no tensors here."""

from __future__ import annotations

import dataclasses
from typing import Literal

Pooling = Literal["mean", "cls", "max"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Shape and conventions of one encoder; `labels` is 0 unless it has a classification head.

    Positions are vectors of a table, if `position_table`; rotations of queries and keys, by the base `thetas[layer]`,
    if there are any; or biases of scores, by distance in so many `relative_buckets`. A token of a layer sees those that
    are no further away than `windows[layer]`, all if there are none. `types` is 0 if token types have no vectors.

    Norms stand after attention and MLP, or before them: then the first attention has none, and there is one at the end.
    A gated MLP multiplies two products, one of them activated.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    position_offset: int
    types: int
    activation: Activation
    epsilon: float
    labels: int
    pooling: Pooling
    normalise: bool
    position_table: bool = True
    thetas: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()
    relative_buckets: int = 0
    norms: Literal["after", "before"] = "after"
    gated: bool = False
    biased: bool = True
    norms_biased: bool = True

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def max_positions(self) -> int:
        """Most tokens a text may have by the position table."""
        return self.positions - self.position_offset

    @property
    def plain(self) -> bool:
        """True if it computes as BERT does."""
        rotated = bool(self.thetas or self.relative_buckets)
        return self.norms == "after" and not self.gated and not rotated
