"""The torch decoder: the forward pass of all families of decoders over a flat batch of rows and paged KV."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from engine.kernels.attention_plan import QueryRows, plan_groups
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory
from engine.kernels.partial import Partial, merge
from engine.kernels.reference_attention import paged_attention, partial_attention
from engine.kernels.two_sides import SplitRows, rest_sides
from engine.models.decoders.rope import RopeSpec
from engine.models.decoders.rotary import angles, frequencies, rotate
from engine.models.decoders.spec import DecoderSpec
from engine.models.decoders.weights import EMBED, HEAD, LayerNorms, embed_scale, norm_names


class DecoderLinear(NamedTuple):
    """A matrix (out, in) and its bias, if it has one."""

    weight: Tensor
    bias: Tensor | None


class DecoderLayer(NamedTuple):
    """One layer's weights; projections that share their input are joined."""

    norms: LayerNorms[Tensor]
    qkv: DecoderLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: DecoderLinear
    gate_up: DecoderLinear
    down: DecoderLinear


class Attention(NamedTuple):
    """An implementation of attention over pages.

    `plan(queries, pools, shared)` plans a step for every layer group, where `shared` query heads share one head of K
    and V; a group's plan has the rows' `positions` and their `slots` for `PageMemory.write`.
    `attend(q, pool, layer, planned)` is a `paged_attention`. `plan_partly` plans attention to resident pages only, and
    `attend_partly`, called as `attend`, returns what is to be merged with other pages'.
    """

    plan: Callable[[Sequence[QueryRows], Sequence[PageMemory], int], Sequence[Any]]
    attend: Callable[[Tensor, PageMemory, int, Any], Tensor]
    plan_partly: Callable[[Sequence[QueryRows], Sequence[PageMemory], int], Sequence[Any]]
    attend_partly: Callable[[Tensor, PageMemory, int, Any], Partial]


def attention_on(device: torch.device) -> Attention:
    """Return the fastest attention for a device: Triton's kernel on CUDA, if installed, else the reference."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from engine.kernels import triton_attention  # noqa: PLC0415 - there on CUDA only

            return Attention(
                triton_attention.plan_blocks,
                triton_attention.paged_attention,
                partial(triton_attention.plan_blocks, whole=False),
                triton_attention.partial_attention,
            )
    return Attention(
        plan_groups, paged_attention, partial(plan_groups, whole=False), partial_attention
    )


class RowOperations(NamedTuple):
    """Operations on rows: RMS norm (see `rms_norm`), rotation (see `rotate`), writing of K and V to pages.

    `write(pool, layer, slots, keys, values)` is `PageMemory.write`.
    """

    norm: Callable[..., Tensor]
    rotate: Callable[[Tensor, Tensor], Tensor]
    write: Callable[[PageMemory, int, Tensor, Tensor, Tensor], None]


def row_operations_on(device: torch.device) -> RowOperations:
    """Return the fastest operations on rows for a device: Triton's kernels on CUDA, if installed, else torch's."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from engine.kernels import triton_rows  # noqa: PLC0415 - there on CUDA only

            return RowOperations(triton_rows.rms_norm, triton_rows.rotate, triton_rows.write_pages)
    return RowOperations(rms_norm, rotate, PageMemory.write)


def rms_norm(
    rows: Tensor, weight: Tensor, *, epsilon: float, offset: float, rounds_before: bool
) -> Tensor:
    """Return the RMS norm of (…, size) in fp32, times `offset` + `weight` (size,).

    `rounds_before` rounds before the weight, and takes no offset.
    """
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if rounds_before:
        return weight * wide.to(rows.dtype)
    return (wide * (offset + weight.float())).to(rows.dtype)


class Heads(NamedTuple):
    """Queries (rows, heads, dim), keys and values (rows, kv heads, dim) of a layer; queries and keys are rotated."""

    q: Tensor
    k: Tensor
    v: Tensor


class TorchState:
    """The rows of a step between two stages; after the last stage `rows` (rows, hidden) lack only the last norm."""

    def __init__(
        self, decoder: TorchDecoder, tokens: Tensor, positions: Tensor, long: Tensor | None
    ) -> None:
        self._decoder = decoder
        self._rotations = decoder.rotations(positions, long)
        self.rows = decoder.embedded(tokens)

    def before(self, layer: int) -> Tensor:
        """Return queries, keys and values of a layer, rotated: (rows, heads + 2 * kv heads, dim)."""
        return torch.cat(self._decoder.project(layer, self.rows, self._rotations), dim=1)

    def after(self, layer: int, attended: Tensor) -> None:
        """Finish a layer, given the result of its attention, (rows, heads, dim): projection and MLP."""
        self.rows = self._decoder.follow(layer, self.rows, attended)


class TorchAttention:
    """Attention of a step over pages on the decoder's device, planned once and called layer by layer."""

    def __init__(
        self, decoder: TorchDecoder, groups: Sequence[Any], pools: Sequence[PageMemory]
    ) -> None:
        self._decoder, self._groups, self._pools = decoder, groups, pools

    def attend(self, group: int, at: int, joined: Tensor, out: Tensor) -> None:
        """Write keys and values to their pages and attend with the queries in layer `at` of a group."""
        heads = _heads(self._decoder.spec, joined)
        heads = heads._replace(q=heads.q.contiguous())
        out.copy_(self._decoder.attend(heads, self._pools[group], at, self._groups[group]))


class TorchRest:
    """Attention of a step to the pages after fronts that are attended elsewhere, planned once.

    Merging is exact up to the rounding of fp32.
    """

    def __init__(
        self, decoder: TorchDecoder, groups: Sequence[Any], pools: Sequence[PageMemory]
    ) -> None:
        self._decoder, self._groups, self._pools = decoder, groups, pools
        self._found: Partial | None = None

    def attend(self, group: int, at: int, joined: Tensor) -> None:
        """Write keys and values to their pages and attend in layer `at` of a group, up to the merging."""
        heads = _heads(self._decoder.spec, joined)
        heads = heads._replace(q=heads.q.contiguous())
        pool, plan = self._pools[group], self._groups[group]
        self._found = self._decoder.attend_partly(heads, pool, at, plan)

    def join(self, front: Partial, out: Tensor) -> None:
        """Merge what the last call of `attend` found with the attention to the fronts; `out` is (rows, heads, dim)."""
        assert self._found is not None
        out.copy_(merge(front, self._found).result())


class TorchDecoder:
    """A loaded model without pages, which every call receives as an argument."""

    def __init__(self, spec: DecoderSpec, weights: dict[str, Tensor]) -> None:
        """Take weights with the names and shapes of `weights.wanted`; joined weights are removed from the dict."""
        self.spec = spec
        self._embed = weights[EMBED]
        self._norm = weights["model.norm.weight"]
        self._head = weights.get(HEAD, self._embed)
        self._layers = [_layer(weights, f"model.layers.{n}", spec) for n in range(spec.layers)]
        self._inverse, self._long_inverse = (
            {
                rope: frequencies(rope, spec.head_dim, long=long).to(self._embed.device)
                for rope in spec.rotations
            }
            for long in (False, True)
        )
        self._places = {
            layer: (group, at)
            for group, (_, layers) in enumerate(spec.groups)
            for at, layer in enumerate(layers)
        }
        self._act = _activation(spec)
        self._embed_scale = embed_scale(spec, self.dtype)
        self._attention = attention_on(self.device)
        self._operations = row_operations_on(self.device)

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

        Each layer waits until its pages have arrived. ValueError if positions do not rise or a page that a row needs is
        missing.
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
        """Compute a step that `Attention.plan` has planned."""
        rotations = self.rotations(groups[0].positions, groups[0].long)
        rows = self.embedded(tokens)
        for number in range(len(self._layers)):
            group, at = self._places[number]
            if arrival is not None:
                arrival.wait(number)
            heads = self.project(number, rows, rotations)
            rows = self.follow(number, rows, self.attend(heads, pools[group], at, groups[group]))
        return rows

    def begin(self, tokens: Tensor, positions: Tensor, long: Tensor | None = None) -> TorchState:
        """Begin a step that is computed stage by stage, with rows (rows,) of token ids at positions (rows,).

        `long` (rows,) marks the rows of long texts; None: no row.
        """
        return TorchState(self, tokens, positions, long)

    def planned(self, queries: Sequence[QueryRows], pools: Sequence[PageMemory]) -> TorchAttention:
        """Plan the attention of a step that is computed stage by stage (see `TorchAttention`)."""
        groups = self._attention.plan(queries, pools, self.spec.heads // self.spec.kv_heads)
        return TorchAttention(self, groups, pools)

    def planned_rest(self, queries: Sequence[SplitRows], pools: Sequence[PageMemory]) -> TorchRest:
        """Plan attention to the pages after fronts that are attended elsewhere (see `TorchRest`)."""
        shared = self.spec.heads // self.spec.kv_heads
        return TorchRest(
            self, self._attention.plan_partly(rest_sides(queries, pools), pools, shared), pools
        )

    def attend_partly(self, heads: Heads, pool: PageMemory, at: int, plan: Any) -> Partial:
        """Write rows' keys and values to their pages and attend to some pages with their queries."""
        self._operations.write(pool, at, plan.slots, heads.k, heads.v)
        return self._attention.attend_partly(heads.q, pool, at, plan)

    def attend(self, heads: Heads, pool: PageMemory, at: int, plan: Any) -> Tensor:
        """Write rows' keys and values to their pages and attend with their queries: (rows, heads, dim)."""
        self._operations.write(pool, at, plan.slots, heads.k, heads.v)
        return self._attention.attend(heads.q, pool, at, plan)

    def logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits (rows, vocabulary) of rows that `hidden` returned."""
        found = F.linear(self._normed(rows, self._norm), self._head).float()
        found = found if self.spec.logit_scale == 1 else found * self.spec.logit_scale
        cap = self.spec.logit_cap
        return cap * torch.tanh(found / cap) if cap else found

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (rows, hidden) of token ids."""
        rows = F.embedding(tokens, self._embed)
        return rows if self._embed_scale == 1 else rows * self._embed_scale

    def rotations(self, positions: Tensor, long: Tensor | None) -> dict[RopeSpec, Tensor]:
        """Return each rotation of positions (see `angles`); rows that are `long` have the frequencies of long texts."""
        found = {}
        for rope, short in self._inverse.items():
            inverse = short
            if long is not None and rope.long_factors:
                inverse = torch.where(long[:, None], self._long_inverse[rope], short)
            found[rope] = angles(positions, inverse, rope.attention, self.dtype)
        return found

    def project(self, number: int, rows: Tensor, rotations: dict[RopeSpec, Tensor]) -> Heads:
        """Return queries, keys and values of a layer, rotated."""
        spec, layer = self.spec, self._layers[number]
        joined = _apply(layer.qkv, self._normed(rows, layer.norms.before_attention))
        joined = joined.view(len(rows), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        q, k, v = _heads(spec, joined)
        if spec.qk_norm == "whole":
            q = self._normed(q.flatten(1), layer.q_norm).view(q.shape)
            k = self._normed(k.flatten(1), layer.k_norm).view(k.shape)
        else:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        rope = spec.ropes[number]
        if rope is None:
            return Heads(q, k, v)
        turn = self._operations.rotate
        return Heads(turn(q, rotations[rope]), turn(k, rotations[rope]), v)

    def follow(self, number: int, rows: Tensor, attended: Tensor) -> Tensor:
        """Return the rows after a layer: with the projection of its attention's result and its MLP added."""
        layer = self._layers[number]
        rows = self._added(
            rows, _apply(layer.out, attended.flatten(1)), layer.norms.after_attention
        )
        gate, up = _apply(layer.gate_up, self._normed(rows, layer.norms.before_mlp)).chunk(
            2, dim=-1
        )
        return self._added(rows, _apply(layer.down, self._act(gate) * up), layer.norms.after_mlp)

    def _added(self, rows: Tensor, more: Tensor, norm: Tensor | None) -> Tensor:
        """Return rows plus the output of attention or MLP."""
        return torch.add(rows, self._normed(more, norm), alpha=self.spec.residual_scale)

    def _normed(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        """Return the RMS norm of rows in fp32, rounded before or after the weight as in transformers; None: no norm."""
        if weight is None:
            return rows
        spec = self.spec
        return self._operations.norm(
            rows,
            weight,
            epsilon=spec.epsilon,
            offset=spec.norm_offset,
            rounds_before=spec.norms == "before",
        )


def _heads(spec: DecoderSpec, joined: Tensor) -> Heads:
    """Return the parts of (rows, heads + 2 * kv heads, dim)."""
    values = spec.heads + spec.kv_heads
    return Heads(joined[:, : spec.heads], joined[:, spec.heads : values], joined[:, values:])


def _activation(spec: DecoderSpec) -> Callable[[Tensor], Tensor]:
    if spec.activation == "silu":
        return F.silu
    approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
    return lambda rows: F.gelu(rows, approximate=approximate)


def _apply(linear: DecoderLinear, rows: Tensor) -> Tensor:
    return F.linear(rows, linear.weight, linear.bias)


def _layer(weights: dict[str, Tensor], base: str, spec: DecoderSpec) -> DecoderLayer:
    def joined(*names: str) -> DecoderLinear:
        """Concatenate matrices that share their input, and drop each original at once."""
        matrices = [weights.pop(f"{base}.{name}.weight") for name in names]
        biases = [weights.pop(f"{base}.{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        if len(matrices) == 1:
            return DecoderLinear(matrices[0], biases[0])
        return DecoderLinear(torch.cat(matrices), torch.cat(present) if present else None)

    attention = "self_attn."
    return DecoderLayer(
        norms=LayerNorms(*(weights.get(f"{base}.{name}.weight") for name in norm_names(spec))),
        qkv=joined(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
        q_norm=weights.get(f"{base}.{attention}q_norm.weight"),
        k_norm=weights.get(f"{base}.{attention}k_norm.weight"),
        out=joined(attention + "o_proj"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )
