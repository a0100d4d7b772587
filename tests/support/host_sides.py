"""Attention on the host twice over the same pages: with a helper at an address, and by this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from engine.decoder.executor.host_attention import HostAttention, HostAttentionThread
from engine.decoder.executor.torch_executor import StepRows
from engine.host.helped_attention import HelpedAttention, helped
from engine.kernels.page_memory import PageMemory, segment_bytes
from engine.kernels.partial import Partial
from engine.models.decoders.compiled_decoder import load_kernels
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec

PAGES, LAYERS, HEADS, KV_HEADS, DIM = 40, 3, 6, 2, 24
NEVER_S = 3600.0


def decoder_spec(*, windowed: bool = True) -> DecoderSpec:
    """Return a model whose scores are capped; if `windowed` its middle layer has one, and pages lie in two groups."""
    middle = "sliding_attention" if windowed else "full_attention"
    config = {
        "model_type": "gemma2", "hidden_size": HEADS * DIM, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "num_hidden_layers": LAYERS, "intermediate_size": 1,
        "vocab_size": 1, "max_position_embeddings": 2048, "sliding_window": 50, "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 5.0,
        "layer_types": ["full_attention", middle, "full_attention"],
    }  # fmt: skip
    return parse_decoder(config, where="test")


class AttendingSide(NamedTuple):
    """Attention over pages of its own."""

    attention: HostAttention
    pools: list[PageMemory]


class Sides(NamedTuple):
    """The same pages twice: attended with the help of who attaches at `address`, and by this process alone."""

    ours: AttendingSide
    alone: AttendingSide
    address: HelperAddress

    @property
    def helped(self) -> HelpedAttention:
        assert isinstance(self.ours.attention, HelpedAttention)
        return self.ours.attention


def _pools(
    spec: DecoderSpec, segment: MemorySegment | None, dtype: torch.dtype
) -> list[PageMemory]:
    cpu = torch.device("cpu")
    pools = [
        PageMemory(spec, window, layers, PAGES, dtype=dtype, device=cpu, segment=segment, packed=True)
        for window, layers in spec.groups
    ]  # fmt: skip
    for pool in pools:
        pool.data.copy_(
            torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(len(pool.layers)))
        )
    return pools


@contextmanager
def two_sides(
    address: HelperAddress, dtype: torch.dtype, *, windowed: bool = True
) -> Iterator[Sides]:
    """Make both sides; the one that is helped waits for ever."""
    kernels, spec = load_kernels(), decoder_spec(windowed=windowed)
    assert kernels is not None
    segment = MemorySegment(segment_bytes(spec, PAGES, dtype))
    ours, alone = _pools(spec, segment, dtype), _pools(spec, None, dtype)
    own = HostAttentionThread(kernels, spec, ours)
    made = helped(own, address, spec, ours, segment, threads=1)
    made.patience_s = NEVER_S
    found = Sides(
        AttendingSide(made, ours),
        AttendingSide(HostAttentionThread(kernels, spec, alone), alone),
        address,
    )
    try:
        yield found
    finally:
        found.alone.attention.close()
        made.close()


def step(
    side: AttendingSide, queries: list[StepRows], seed: int, disturb: object = None
) -> list[Tensor]:
    """Attend with two sub-batches in flight in all layers; return every result. `disturb` is called amid."""
    halves = [half for half in (queries[::2], queries[1::2]) if half]
    batches = [side.attention.plan(half) for half in halves]
    draw = torch.Generator().manual_seed(seed)
    results = []
    for group, pool in enumerate(side.pools):
        for at in range(len(pool.layers)):
            flights = []
            for batch, half in zip(batches, halves, strict=True):
                joined = torch.randn(len(half), HEADS + 2 * KV_HEADS, DIM, generator=draw)
                out = torch.empty(len(half), HEADS, DIM)
                flights.append((batch.submit(group, at, joined, out), joined, out))
            if callable(disturb):
                disturb()
            for waits, _, out in flights:
                waits.wait()
                results.append(out)
    return results


class FrontedRows(NamedTuple):
    """Rows of a sequence with a front."""

    positions: list[int]
    pages: list[list[int]]
    long: bool = False
    front: int = 0


def check_fronts(sides: Sides, seed: int, disturb: object = None) -> None:
    """Attend to the fronts of three sequences on both sides; compare the bits of partial results, and of pages."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    shared = [*order[:8], *([9999] * 4)]  # the numbers of pages of the other tier
    queries = [
        FrontedRows([300], [shared], front=8),
        FrontedRows([290, 291, 320], [shared], front=8),
        FrontedRows([600], [[*order[8:24], *([9999] * 3)]], front=16),
    ]
    ours, alone = (_fronts(side, queries, seed, disturb) for side in (sides.ours, sides.alone))
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    assert not any(each.isnan().any() for each in ours)
    for mine, theirs in zip(sides.ours.pools, sides.alone.pools, strict=True):
        assert torch.equal(mine.data, theirs.data)


def _fronts(
    side: AttendingSide, queries: list[FrontedRows], seed: int, disturb: object
) -> list[Tensor]:
    batch, draw = side.attention.plan_fronts(queries), torch.Generator().manual_seed(seed)
    rows, results = sum(len(each.positions) for each in queries), list[Tensor]()
    sizes = (rows, HEADS, DIM), (rows, HEADS), (rows, HEADS)
    for at in range(len(side.pools[0].layers)):
        joined = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, generator=draw)
        found = Partial(*(torch.full(size, float("nan")) for size in sizes))
        waits = batch.submit(0, at, joined, found)
        if callable(disturb) and isinstance(side.attention, HelpedAttention):
            disturb()
        waits.wait()
        results += found
    return results


def queries_of(lengths: list[int], seed: int, groups: int = 2) -> list[StepRows]:
    """Return a decoding row of each sequence at the end of its context, on pages drawn without repetition."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for length in lengths:
        count = -(-length // PAGE)
        mine, order = order[:count], order[count:]
        found.append(StepRows([length - 1], [mine] * groups))
    return found


def check_same(
    sides: Sides,
    seed: int,
    disturb: object = None,
    lengths: tuple[int, ...] = (70, 300, 1, 33),
    groups: int = 2,
) -> None:
    """Attend on both sides, and compare the bits of results and pages."""
    queries = queries_of(list(lengths), seed, groups)
    ours = step(sides.ours, queries, seed, disturb)
    alone = step(sides.alone, queries, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    for mine, theirs in zip(sides.ours.pools, sides.alone.pools, strict=True):
        assert torch.equal(mine.data, theirs.data)
