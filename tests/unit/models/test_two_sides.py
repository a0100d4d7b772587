"""Attention to a front in one memory and to the rest in another is attention to all pages in one, to the bit."""

from __future__ import annotations

import ctypes
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.pages.identity import CHUNK, PAGE
from engine.kernels.attention_plan import plan_groups
from engine.kernels.page_memory import PageMemory, pack, unpack
from engine.kernels.partial import Partial, merge
from engine.kernels.reference_attention import partial_attention
from engine.kernels.two_sides import front_sides, rest_sides
from engine.models.decoders.compiled_decoder import PlannedAttention, PlannedFront, PlannedRest
from engine.models.decoders.rope import RopeSpec
from engine.models.decoders.spec import DecoderSpec
from tests.support.kernels import decoder_kernels, triton_kernels

KERNELS = decoder_kernels()
TRITON = triton_kernels("triton_attention")
LAYERS, PAGES = 2, 90


class SplitText(NamedTuple):
    """Rows of one sequence and its pages; the first `front` are in the host's memory."""

    positions: list[int]
    pages: list[list[int]]
    long: bool = False
    front: int = 0


class Case(NamedTuple):
    """Sequences with fronts, the same sequences in one memory, and their keys, values and queries."""

    spec: DecoderSpec
    split: list[SplitText]
    whole: list[SplitText]
    one: PageMemory
    device: PageMemory
    host: PageMemory
    joined: torch.Tensor


def _case(seed: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, cap: float) -> Case:
    """Return one to three sequences, whose pages are scattered and hold random numbers."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spec = DecoderSpec(
        family="llama", layers=LAYERS, hidden=heads * dim, heads=heads, kv_heads=kv_heads,
        head_dim=dim, intermediate=8, vocabulary=8, positions=4096, epsilon=1e-6,
        activation="silu", ropes=(RopeSpec("default", 10_000.0),) * LAYERS, windows=(None,) * LAYERS,
        qkv_bias=False, out_bias=False, mlp_bias=False, tied=True, score_cap=cap,
    )  # fmt: skip
    one, device, host = (
        PageMemory(
            spec, None, range(LAYERS), PAGES, dtype=dtype, device=torch.device("cpu"), packed=True
        )
        for _ in range(3)
    )
    # What a page holds before it is written must not show.
    for pool in (one, device, host):
        pool.data.fill_(1e4)
    free = [draw.sample(range(PAGES), PAGES) for _ in range(3)]
    split, whole = [], []
    for _ in range(draw.randint(1, 3)):
        front = CHUNK * draw.randint(1, 2)
        length = front * PAGE + draw.randint(1, 11 * PAGE)
        rows = min(length - front * PAGE, draw.choice((1, 1, 5, 70)))
        positions = list(range(length - rows, length))
        tables = [[free[pool].pop() for _ in range(-(-length // PAGE))] for pool in range(3)]
        for at, page in enumerate(tables[0]):
            contents = torch.randn(LAYERS, 2, kv_heads, PAGE, dim).to(dtype)
            there = host if at < front else device
            packed = pack(contents[None])[0]
            one.data[page] = packed
            there.data[tables[2 if at < front else 1][at]] = packed
        split.append(SplitText(positions, [[*tables[2][:front], *tables[1][front:]]], front=front))
        whole.append(SplitText(positions, [tables[0]]))
    joined = torch.randn(sum(len(q.positions) for q in split), heads + 2 * kv_heads, dim)
    return Case(spec, split, whole, one, device, host, joined)


def _room(rows: int, spec: DecoderSpec) -> Partial:
    sizes = (rows, spec.heads, spec.head_dim), (rows, spec.heads), (rows, spec.heads)
    return Partial(*(torch.full(size, float("nan")) for size in sizes))


def _over_both(kernels: ctypes.CDLL, case: Case, layer: int, threads: int) -> torch.Tensor:
    """Attend as a step does: the host to the fronts, the device to the rest, which it merges with what it gets."""
    spec, joined = case.spec, case.joined
    front = PlannedFront(kernels, spec, case.split, [case.host], threads=threads)
    rest = PlannedRest(kernels, spec, case.split, [case.device], threads=threads)
    found, out = _room(len(joined), spec), torch.empty(len(joined), spec.heads, spec.head_dim)
    before = case.host.data.clone()
    rest.attend(0, layer, joined)
    front.attend(0, layer, joined, found)
    rest.join(found, out)
    assert torch.equal(case.host.data, before)
    return out


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 1 << 30), st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.sampled_from(((6, 2), (4, 1), (3, 3), (8, 8))), st.sampled_from((8, 64, 100)),
    st.sampled_from((0.0, 30.0)), st.integers(1, 5),
)  # fmt: skip
def test_two_tiers_are_one_to_the_bit(
    seed: int, dtype: torch.dtype, heads: tuple[int, int], dim: int, cap: float, threads: int
) -> None:
    """Decode rows and rows of prompts, grouped heads, every kind of pages, every build, any number of threads."""
    for kernels in KERNELS:
        case = _case(seed, dtype, *heads, dim, cap)
        for layer in range(LAYERS):
            expected = torch.empty(len(case.joined), heads[0], dim)
            plain = PlannedAttention(kernels, case.spec, case.whole, [case.one], threads=1)
            plain.attend(0, layer, case.joined, expected)
            assert torch.equal(_over_both(kernels, case, layer, threads), expected)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_torch_merges_up_to_rounding(cap: float) -> None:
    """The reference and the kernels for CUDA find what the compiled ones do, as far as fp32 goes."""
    case = _case(5, torch.float32, 6, 2, 16, cap)
    expected = _over_both(KERNELS[0], case, 1, 1)
    q = case.joined[:, :6].contiguous()
    found, triton = [], []
    for pool, side in ((case.host, front_sides), (case.device, rest_sides)):
        plain = PageMemory(
            case.spec, None, range(LAYERS), PAGES, dtype=torch.float32, device=torch.device("cpu")
        )
        plain.data.copy_(unpack(pool.data))
        rows = side(case.split, [plain])
        [plan] = plan_groups(rows, [plain], whole=False)
        found.append(partial_attention(q, plain, 1, plan))
        if TRITON is not None:
            [blocks] = TRITON.plan_blocks(rows, [plain], 3, whole=False)
            triton.append(TRITON.partial_attention(q, plain, 1, blocks))
    for parts in (found, triton):
        if parts:
            assert torch.allclose(merge(*parts).result(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (SplitText([300], [[0] * 10], front=5), "multiple of 8"),
        (SplitText([300], [[0] * 10]), "multiple of 8"),
        (SplitText([300], [[0] * 7 + [-1] + [0] * 2], front=8), "not resident"),
        (SplitText([300], [[0] * 9 + [-1]], front=8), "not resident"),
        (SplitText([255], [[0] * 10], front=8), "lies in its front"),
    ],
)
def test_fronts_that_cannot_be(rows: SplitText, said: str) -> None:
    """A front is whole chunks of pages that are there, and rows come after it."""
    with pytest.raises(ValueError, match=said):
        (front_sides([rows], []), rest_sides([rows], []))


def test_windows_have_no_fronts() -> None:
    """Layers with windows are refused."""
    case = _case(1, torch.float32, 2, 1, 8, 0.0)
    pool = PageMemory(
        case.spec, 40, range(LAYERS), 1, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(ValueError, match="windows"):
        front_sides(case.split, [pool])
