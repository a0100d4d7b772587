"""The specification of a decoder of any family; no tensors here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from engine.models.decoders.rope import RopeSpec

Activation = Literal["silu", "gelu", "gelu_tanh"]
# The position of a layer's norms: on the inputs of attention and MLP, on their outputs before the addition, or both.
NormPlacement = Literal["before", "after", "around"]
# Norms of queries and keys: of each head separately, or of all heads as one vector.
QkNorm = Literal["head", "whole"]


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and conventions of one decoder.

    `windows[layer]` is the number of positions that a row of that layer sees, itself included; None: all before it.
    `ropes[layer]` is the rotation of the layer's queries and keys; None: no rotation.

    Token embeddings are multiplied by `embed_scale` (first rounded to their data type, if `embed_scale_rounded`), the
    outputs of attention and MLP by `residual_scale`, logits by `logit_scale`, and attention scores by `score_scale`
    (None: 1 / sqrt(head_dim)). A soft cap c above 0 turns x into c * tanh(x / c): `score_cap` caps attention scores,
    `logit_cap` logits. A norm multiplies by weight + `norm_offset`.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    epsilon: float
    activation: Activation
    ropes: tuple[RopeSpec | None, ...]
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    qk_norm: QkNorm | None = None
    norms: NormPlacement = "before"
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    embed_scale_rounded: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    score_scale: float | None = None
    score_cap: float = 0.0

    @property
    def groups(self) -> list[tuple[int | None, list[int]]]:
        """Return (window, layers) of each layer group; layers with one window share a page table."""
        found: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            found.setdefault(window, []).append(layer)
        return list(found.items())

    @property
    def rotations(self) -> list[RopeSpec]:
        """Return the distinct rotations of the layers."""
        return list(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    @property
    def short_context(self) -> int:
        """The length in tokens beyond which a text's keys and queries use the long frequencies; 0: they never do."""
        return max((rope.short_context for rope in self.rotations), default=0)

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale
