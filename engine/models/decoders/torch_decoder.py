"""The forward pass of Llama, Qwen2, Qwen3 and Mistral over a flat batch of rows and paged KV."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.kernels.attention_plan import QueryRows, plan_groups
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory
from engine.kernels.reference_attention import paged_attention
from engine.models.decoders.rotary import angles, frequencies, rotate
from engine.models.decoders.spec import DecoderSpec


class DecoderLinear(NamedTuple):
    """A matrix (out, in) and its bias, where there is one."""

    weight: Tensor
    bias: Tensor | None


class DecoderLayer(NamedTuple):
    """One layer's weights; projections with one input are joined."""

    before: Tensor
    qkv: DecoderLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: DecoderLinear
    after: Tensor
    gate_up: DecoderLinear
    down: DecoderLinear


class Attention(NamedTuple):
    """One way to attend over pages.

    `plan(queries, pools, shared)` works out a step for every layer group, with `shared` query heads on one head of K
    and V: something with the rows' `positions` and their `slots` for `Pool.write`. `attend(q, pool, layer, planned)` is
    as `paged_attention`.
    """

    plan: Callable[[Sequence[QueryRows], Sequence[PageMemory], int], Sequence[Any]]
    attend: Callable[[Tensor, PageMemory, int, Any], Tensor]


def attention_on(device: torch.device) -> Attention:
    """Return the fastest way on a device: Triton's kernel on CUDA, which torch brings there, else the reference."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from engine.kernels import triton_attention  # noqa: PLC0415 - there on CUDA only

            return Attention(triton_attention.plan_blocks, triton_attention.paged_attention)
    return Attention(plan_groups, paged_attention)


class TorchDecoder:
    """A loaded model without its pages; every call says where they are."""

    def __init__(self, spec: DecoderSpec, weights: dict[str, Tensor]) -> None:
        """Take weights named and shaped as `weights.wanted` says; those that are joined are removed from the dict."""
        self.spec = spec
        self._embed = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._head = self._embed if spec.tied else weights["lm_head.weight"]
        self._layers = [_layer(weights, f"model.layers.{n}", spec) for n in range(spec.layers)]
        self._inverse = frequencies(spec.rope, spec.head_dim).to(self._embed.device)
        self._places = {
            layer: (group, at)
            for group, (_, layers) in enumerate(spec.groups)
            for at, layer in enumerate(layers)
        }
        self._act = _activation(spec)
        self._attention = attention_on(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        return self._embed.dtype

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._embed.device

    def arrival(self) -> PageArrival:
        """Return the count of layers whose pages have arrived, for a step of this model to wait on."""
        return PageArrival(self.spec.layers)

    def hidden(
        self,
        tokens: Tensor,
        queries: Sequence[QueryRows],
        pools: Sequence[PageMemory],
        arrival: PageArrival | None = None,
    ) -> Tensor:
        """Compute rows (rows,) of token ids and write their K and V; return (rows, hidden) before the last norm.

        A layer attends once its pages are there. ValueError if positions do not rise or a page that a row needs is not
        there.
        """
        groups = self._attention.plan(queries, pools, self.spec.heads // self.spec.kv_heads)
        return self.run(tokens, groups, pools, arrival)

    def run(
        self,
        tokens: Tensor,
        groups: Sequence[Any],
        pools: Sequence[PageMemory],
        arrival: PageArrival | None = None,
    ) -> Tensor:
        """Compute a step that `Attention.plan` has worked out."""
        positions = groups[0].positions
        rotation = angles(positions, self._inverse, self.spec.rope.attention, self.dtype)
        rows = F.embedding(tokens, self._embed)
        for number, layer in enumerate(self._layers):
            group, at = self._places[number]
            if arrival is not None:
                arrival.wait(number)
            rows = rows + self._attend(layer, rows, rotation, groups[group], pools[group], at)
            gate, up = _apply(layer.gate_up, self._normed(rows, layer.after)).chunk(2, dim=-1)
            rows = rows + _apply(layer.down, self._act(gate) * up)
        return rows

    def logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocabulary) of rows that `hidden` returned."""
        return F.linear(self._normed(rows, self._norm), self._head).float()

    def _attend(
        self,
        layer: DecoderLayer,
        rows: Tensor,
        rotation: Tensor,
        plan: Any,
        pool: PageMemory,
        at: int,
    ) -> Tensor:
        spec = self.spec
        joined = _apply(layer.qkv, self._normed(rows, layer.before))
        joined = joined.view(len(rows), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        values = spec.heads + spec.kv_heads
        q, k, v = joined[:, : spec.heads], joined[:, spec.heads : values], joined[:, values:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        pool.write(at, plan.slots, rotate(k, rotation), v)
        found = self._attention.attend(rotate(q, rotation), pool, at, plan)
        return _apply(layer.out, found.flatten(1))

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in fp32, rounded before the weight, as transformers rounds."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.epsilon)
        return weight * wide.to(rows.dtype)


def _activation(spec: DecoderSpec) -> Callable[[Tensor], Tensor]:
    if spec.activation == "silu":
        return F.silu
    approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
    return lambda rows: F.gelu(rows, approximate=approximate)


def _apply(linear: DecoderLinear, rows: Tensor) -> Tensor:
    return F.linear(rows, linear.weight, linear.bias)


def _layer(weights: dict[str, Tensor], base: str, spec: DecoderSpec) -> DecoderLayer:
    def joined(*names: str) -> DecoderLinear:
        """Concatenate matrices with one input, dropping the originals at once."""
        matrices = [weights.pop(f"{base}.{name}.weight") for name in names]
        biases = [weights.pop(f"{base}.{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        if len(matrices) == 1:
            return DecoderLinear(matrices[0], biases[0])
        return DecoderLinear(torch.cat(matrices), torch.cat(present) if present else None)

    attention = "self_attn."
    return DecoderLayer(
        before=weights[f"{base}.input_layernorm.weight"],
        qkv=joined(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
        q_norm=weights[f"{base}.{attention}q_norm.weight"] if spec.qk_norm else None,
        k_norm=weights[f"{base}.{attention}k_norm.weight"] if spec.qk_norm else None,
        out=joined(attention + "o_proj"),
        after=weights[f"{base}.post_attention_layernorm.weight"],
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )
