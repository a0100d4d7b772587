"""The forward pass of BERT and XLM-R encoders over packed rows: no padding anywhere.

All texts of a batch lie one after another in one (tokens, hidden) matrix, so every linear runs once over real tokens
only; attention runs per group of texts of equal length. Residuals, layer norms and softmax stay in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.encoder.batching import length_order
from engine.encoder.pooling import pool
from engine.models.encoders.positions import positions
from engine.models.encoders.spec import EncoderSpec, Pooling

MICROBATCH_TOKENS = 4096
Precision = Literal["fp32", "bf16"]


class EncoderLinear:
    """One linear in the chosen precision; on the CPU bf16 weights are packed once for oneDNN."""

    def __init__(
        self, weight: Tensor, bias: Tensor, precision: Precision, device: torch.device
    ) -> None:
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self._weight = weight.to(device, kind)
        self._bias = bias.to(device, kind)
        self._packed: Tensor | None = None
        if precision == "bf16" and device.type == "cpu" and torch.backends.mkldnn.enabled:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)
            self._weight = self._packed

    @classmethod
    def of(
        cls,
        weights: dict[str, Tensor],
        names: Sequence[str],
        precision: Precision,
        device: torch.device,
    ) -> EncoderLinear:
        """Fuse the named linears, which share their input, into one."""
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        bias = torch.cat([weights[f"{name}.bias"] for name in names])
        return cls(weight, bias, precision, device)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows @ weight.T + bias, in this linear's precision, as `rows` must be."""
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._packed, self._bias, "none", [], ""
            )
            return out
        return F.linear(rows, self._weight, self._bias)


class _Norm:
    def __init__(
        self, weights: dict[str, Tensor], name: str, epsilon: float, device: torch.device
    ) -> None:
        self._weight = weights[f"{name}.weight"].to(device)
        self._bias = weights[f"{name}.bias"].to(device)
        self._epsilon = epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._epsilon)


class _Layer:
    def __init__(
        self,
        weights: dict[str, Tensor],
        index: int,
        spec: EncoderSpec,
        precision: Precision,
        device: torch.device,
    ) -> None:
        base = f"encoder.layer.{index}"

        def linear(*names: str) -> EncoderLinear:
            return EncoderLinear.of(
                weights, [f"{base}.{name}" for name in names], precision, device
            )

        self._spec = spec
        self._kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self._qkv = linear("attention.self.query", "attention.self.key", "attention.self.value")
        self._out = linear("attention.output.dense")
        self._up = linear("intermediate.dense")
        self._down = linear("output.dense")
        self._norm1 = _Norm(weights, f"{base}.attention.output.LayerNorm", spec.epsilon, device)
        self._norm2 = _Norm(weights, f"{base}.output.LayerNorm", spec.epsilon, device)

    def __call__(self, rows: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        """`rows` fp32 (tokens, hidden); `groups` holds (texts, length) in the order of the rows."""
        attended = self._attend(self._qkv(rows.to(self._kind)), groups)
        rows = self._norm1(rows + self._out(attended))
        inner = self._activate(self._up(rows.to(self._kind)))
        return self._norm2(rows + self._down(inner))

    def _attend(self, qkv: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        heads, width = self._spec.heads, self._spec.head_dim
        out = torch.empty(qkv.shape[0], heads * width, dtype=qkv.dtype, device=qkv.device)
        at = 0
        for texts, length in groups:
            count = texts * length
            q, k, v = (
                qkv[at : at + count].view(texts, length, 3, heads, width).permute(2, 0, 3, 1, 4)
            )
            attended = F.scaled_dot_product_attention(q, k, v)
            out[at : at + count].view(texts, length, heads, width).copy_(attended.transpose(1, 2))
            at += count
        return out

    def _activate(self, rows: Tensor) -> Tensor:
        if self._spec.activation == "relu":
            return F.relu(rows)
        return F.gelu(rows, approximate="tanh" if self._spec.activation == "gelu_tanh" else "none")


class TorchForward:
    """Hidden states of packed texts, computed by torch on any of its devices."""

    def __init__(
        self,
        spec: EncoderSpec,
        weights: dict[str, Tensor],
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._device = device
        self._words = weights["embeddings.word_embeddings.weight"].to(device)
        self._positions = weights["embeddings.position_embeddings.weight"].to(device)
        self._types = weights["embeddings.token_type_embeddings.weight"].to(device)
        self._norm = _Norm(weights, "embeddings.LayerNorm", spec.epsilon, device)
        self._layers = [
            _Layer(weights, index, spec, precision, device) for index in range(spec.layers)
        ]

    def pooled(
        self,
        texts: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        pooling: Pooling,
        *,
        normalise: bool,
    ) -> Tensor:
        """Return fp32 (texts, hidden), computed in micro-batches of texts of like length."""
        out = torch.empty(len(texts), self._words.shape[1], device=self._device)
        for chosen in length_order([len(text) for text in texts], MICROBATCH_TOKENS):
            picked = [texts[index] for index in chosen]
            kinds = None if types is None else [types[index] for index in chosen]
            lengths = [len(text) for text in picked]
            out[chosen] = pool(self.rows(picked, kinds), lengths, pooling, normalise=normalise)
        return out

    def rows(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None) -> Tensor:
        """Return fp32 (tokens, hidden) for texts sorted by length; `types` are token types, 0 if None."""
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.long)
        starts = torch.tensor([0, *accumulate(len(text) for text in texts)])
        places = positions(self._spec, ids, starts)
        rows = F.embedding(ids.to(self._device), self._words)
        rows = rows + F.embedding(places.to(self._device), self._positions)
        if types is None:
            rows = rows + self._types[0]
        else:
            kinds = torch.tensor([kind for text in types for kind in text], dtype=torch.long)
            rows = rows + F.embedding(kinds.to(self._device), self._types)
        rows = self._norm(rows)
        groups = [(len(list(same)), size) for size, same in groupby(len(text) for text in texts)]
        for layer in self._layers:
            rows = layer(rows, groups)
        return rows
