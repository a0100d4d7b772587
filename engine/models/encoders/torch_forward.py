"""The torch forward pass of all families of encoders, over packed rows without padding.

All texts of a batch lie one after another in one (tokens, hidden) matrix, so each linear layer runs once, over real
tokens only; attention runs once per group of texts of equal length. Residuals, norms and softmax stay in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.encoder.batching import length_order
from engine.encoder.pooling import pool
from engine.models.decoders.rope import RopeSpec
from engine.models.decoders.rotary import angles, frequencies, rotate
from engine.models.encoders.positions import positions
from engine.models.encoders.spec import EncoderSpec, Pooling

MICROBATCH_TOKENS = 4096
Precision = Literal["fp32", "bf16"]


class EncoderLinear:
    """One linear layer in the chosen precision; on the CPU bf16 weights are packed once for oneDNN."""

    def __init__(
        self, weight: Tensor, bias: Tensor, precision: Precision, device: torch.device
    ) -> None:
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self._weight = weight.to(device, kind)
        self._bias = bias.to(device, kind)
        self._packed: Tensor | None = None
        if precision == "bf16" and device.type == "cpu" and packs_bf16():
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
        """Return one layer that fuses the named linear layers, which share their input."""
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        bias = torch.cat([weights[f"{name}.bias"] for name in names])
        return cls(weight, bias, precision, device)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows @ weight.T + bias; `rows` and result have this layer's precision."""
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._packed, self._bias, "none", [], ""
            )
            return out
        return F.linear(rows, self._weight, self._bias)


def packs_bf16() -> bool:
    """Return whether oneDNN can pack bf16 weights on this processor, which takes AVX-512 or similar instructions."""
    return bool(torch.backends.mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Norm:
    def __init__(
        self, weights: dict[str, Tensor], name: str, epsilon: float, device: torch.device
    ) -> None:
        self._weight = weights[f"{name}.weight"].to(device)
        self._bias = weights[f"{name}.bias"].to(device)
        self._epsilon = epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, self._weight.shape, self._weight, self._bias, self._epsilon)


class Distances:
    """The influence of positions on attention, by layer: windows, rotations, and score biases by T5's buckets.

    Masks are kept until `forget` is called.
    """

    def __init__(self, spec: EncoderSpec, weights: dict[str, Tensor], device: torch.device) -> None:
        self._windows = spec.windows or (None,) * spec.layers
        self._thetas = spec.thetas
        self._device = device
        self._inverse = {
            theta: frequencies(RopeSpec("default", theta), spec.head_dim).to(device)
            for theta in set(spec.thetas)
        }
        bias = weights.get("encoder.relative_attention_bias.weight")
        self._bias = None if bias is None else bias.to(device)
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def forget(self) -> None:
        """Free the memory of masks."""
        self._masks.clear()

    def rotation(self, layer: int, length: int) -> Tensor | None:
        """Return cosines and sines, fp32 (2, length, head dim), of a text's positions; None without rotations."""
        if not self._thetas:
            return None
        places = torch.arange(length, device=self._device)
        return angles(places, self._inverse[self._thetas[layer]], 1.0, torch.float32)[:, :, 0]

    def mask(self, layer: int, length: int, dtype: torch.dtype) -> Tensor | None:
        """Return the addends to attention scores of a text, (heads or 1, length, length); None without any."""
        key = self._windows[layer], length
        if key not in self._masks:
            self._masks[key] = self._mask(*key, dtype)
        return self._masks[key]

    def _mask(self, window: int | None, length: int, dtype: torch.dtype) -> Tensor | None:
        if self._bias is not None:
            return self._bias[_buckets(_apart(length, self._device))].permute(2, 0, 1).to(dtype)
        if window is None or length <= window + 1:
            return None
        hidden = _apart(length, self._device).abs() > window
        return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(
            hidden, float("-inf")
        )[None]


def _apart(length: int, device: torch.device) -> Tensor:
    """Return (length, length): the position of each token (second index) minus that of each token (first index)."""
    places = torch.arange(length, device=device)
    return places[None, :] - places[:, None]


def _buckets(apart: Tensor, buckets: int = 32, furthest: int = 128) -> Tensor:
    """Return T5's bucket of each distance: half of the buckets per direction, of these half exact, half logarithmic."""
    half, exact = buckets // 2, buckets // 4
    far = apart.abs()
    scaled = torch.log(far.float() / exact) / math.log(furthest / exact) * (half - exact)
    wide = (exact + scaled.to(torch.long)).clamp(max=half - 1)
    return (apart > 0).to(torch.long) * half + torch.where(far < exact, far, wide)


class _Layer:
    def __init__(
        self,
        weights: dict[str, Tensor],
        index: int,
        spec: EncoderSpec,
        precision: Precision,
        distances: Distances,
        device: torch.device,
    ) -> None:
        base = f"encoder.layer.{index}"

        def linear(*names: str) -> EncoderLinear:
            return EncoderLinear.of(
                weights, [f"{base}.{name}" for name in names], precision, device
            )

        self._spec, self._index, self._distances = spec, index, distances
        self._kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self._qkv = linear("attention.self.query", "attention.self.key", "attention.self.value")
        self._out = linear("attention.output.dense")
        self._up = linear(*(["gate.dense"] if spec.gated else []), "intermediate.dense")
        self._down = linear("output.dense")
        self._norm1: _Norm | None = None
        if f"{base}.attention.output.LayerNorm.weight" in weights:
            self._norm1 = _Norm(weights, f"{base}.attention.output.LayerNorm", spec.epsilon, device)
        self._norm2 = _Norm(weights, f"{base}.output.LayerNorm", spec.epsilon, device)

    def __call__(self, rows: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        """Compute one layer of `rows`, fp32 (tokens, hidden); `groups` are (texts, length) in the order of the rows."""
        if self._spec.norms == "before":
            rows = rows + self._attended(self._normed(rows), groups)
            return rows + self._inner(self._norm2(rows))
        rows = self._normed(rows + self._attended(rows, groups))
        return self._norm2(rows + self._inner(rows))

    def _normed(self, rows: Tensor) -> Tensor:
        return rows if self._norm1 is None else self._norm1(rows)

    def _attended(self, rows: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        return self._out(self._attend(self._qkv(rows.to(self._kind)), groups))

    def _inner(self, rows: Tensor) -> Tensor:
        inner = self._up(rows.to(self._kind))
        if not self._spec.gated:
            return self._down(self._activate(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self._down(self._activate(gate) * up)

    def _attend(self, qkv: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        heads, width = self._spec.heads, self._spec.head_dim
        out = torch.empty(qkv.shape[0], heads * width, dtype=qkv.dtype, device=qkv.device)
        at = 0
        for texts, length in groups:
            count = texts * length
            q, k, v = (
                qkv[at : at + count].view(texts, length, 3, heads, width).permute(2, 0, 3, 1, 4)
            )
            rotation = self._distances.rotation(self._index, length)
            if rotation is not None:
                q, k = (rotate(each.float(), rotation).to(v.dtype) for each in (q, k))
            mask = self._distances.mask(self._index, length, v.dtype)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out[at : at + count].view(texts, length, heads, width).copy_(attended.transpose(1, 2))
            at += count
        return out

    def _activate(self, rows: Tensor) -> Tensor:
        if self._spec.activation == "relu":
            return F.relu(rows)
        if self._spec.activation == "silu":
            return F.silu(rows)
        return F.gelu(rows, approximate="tanh" if self._spec.activation == "gelu_tanh" else "none")


class TorchForward:
    """The forward pass over packed texts, computed by torch on any of its devices."""

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
        table = weights.get("embeddings.position_embeddings.weight")
        self._positions = None if table is None else table.to(device)
        self._types = weights["embeddings.token_type_embeddings.weight"].to(device)
        self._norm = _Norm(weights, "embeddings.LayerNorm", spec.epsilon, device)
        self._distances = distances = Distances(spec, weights, device)
        self._layers = [
            _Layer(weights, index, spec, precision, distances, device)
            for index in range(spec.layers)
        ]
        self._last: _Norm | None = None
        if spec.norms == "before":
            self._last = _Norm(weights, "final_norm", spec.epsilon, device)

    def pooled(
        self,
        texts: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        pooling: Pooling,
        *,
        normalise: bool,
    ) -> Tensor:
        """Return fp32 (texts, hidden), computed in micro-batches of texts of similar length."""
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
        rows = F.embedding(ids.to(self._device), self._words)
        if self._positions is not None:
            starts = torch.tensor([0, *accumulate(len(text) for text in texts)])
            places = positions(self._spec, ids, starts)
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
        self._distances.forget()
        return rows if self._last is None else self._last(rows)
