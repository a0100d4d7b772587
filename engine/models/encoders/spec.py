"""The specification of an encoder of any family; no tensors here."""

from __future__ import annotations

import dataclasses
from typing import Literal

Pooling = Literal["mean", "cls", "max"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Shape and conventions of one encoder; `labels` is 0 unless it has a classification head.

    Positions are embeddings from a table, if `position_table`; rotations of queries and keys with the bases
    `thetas[layer]`, if not empty; or score biases by distance, in `relative_buckets` buckets. In each layer a token
    sees tokens at a distance of at most `windows[layer]`, or all tokens without windows. `types` is 0 if the model has
    no token type embeddings.

    Norms are `after` attention and MLP, or `before` them; in the latter case the first attention has no norm, and a
    last norm follows all layers. A gated MLP multiplies two linear projections, one of them activated.
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
        """The most tokens of a text that the position table allows."""
        return self.positions - self.position_offset

    @property
    def plain(self) -> bool:
        """True if the forward pass is BERT's."""
        rotated = bool(self.thetas or self.relative_buckets)
        return self.norms == "after" and not self.gated and not rotated
