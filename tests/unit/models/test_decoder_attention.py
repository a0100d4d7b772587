"""paged_attention against the formula, in float64, over any positions, page tables, windows and grouped heads."""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.pages.identity import PAGE
from engine.kernels.attention_plan import BLOCK_ROWS, plan_groups
from engine.kernels.page_memory import PageMemory, pack, unpack
from engine.kernels.partial import merge
from engine.kernels.reference_attention import paged_attention
from engine.models.decoders.compiled_decoder import attend, attend_layers, attend_partly
from engine.models.decoders.rope import RopeSpec
from engine.models.decoders.spec import DecoderSpec
from tests.support.kernels import decoder_kernels, triton_kernels

KERNELS = decoder_kernels()
TRITON = triton_kernels("triton_attention")
LAYERS = 2
DIM = 8


class Query(NamedTuple):
    """Rows of one sequence, as attention plans with them."""

    positions: list[int]
    pages: list[list[int]]
    long: bool = False


def _spec(heads: int, kv_heads: int, window: int | None) -> DecoderSpec:
    return DecoderSpec(
        family="mistral", layers=LAYERS, hidden=heads * DIM, heads=heads, kv_heads=kv_heads,
        head_dim=DIM, intermediate=8, vocabulary=8, positions=4096, epsilon=1e-6,
        activation="silu", ropes=(RopeSpec("default", 10_000.0),) * LAYERS, windows=(window,) * LAYERS,
        qkv_bias=False, out_bias=False, mlp_bias=False, tied=True,
    )  # fmt: skip


def _pool(
    spec: DecoderSpec, pages: int, dtype: torch.dtype = torch.float32, *, packed: bool = False
) -> PageMemory:
    pool = PageMemory(
        spec, spec.windows[0], range(LAYERS), pages, dtype=dtype, device=torch.device("cpu"),
        packed=packed,
    )  # fmt: skip
    pool.data.fill_(1e4)  # what a page holds before it is written must not show
    return pool


def _formula(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    window: int | None,
    scale: float | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Return what one row (heads, dim) at `position` finds among all keys (tokens, kv heads, dim) of its sequence."""
    first = 0 if window is None else max(0, position - window + 1)
    shared = q.shape[0] // keys.shape[1]
    seen = keys[first : position + 1].double().repeat_interleave(shared, 1)
    scores = torch.einsum("hd,thd->ht", q.double(), seen) * (scale or q.shape[1] ** -0.5)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    own = values[first : position + 1].double().repeat_interleave(shared, 1)
    return torch.einsum("ht,thd->hd", scores.softmax(-1), own)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, int, int | None, list[list[int]], int]:
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 4)))
    window = draw(st.sampled_from((None, 1, 7, 32, 40, 90)))
    sequences = []
    for _ in range(draw(st.integers(1, 7))):
        if draw(st.booleans()):  # a decode row
            sequences.append([draw(st.integers(0, 300))])
        else:
            found = draw(st.sets(st.integers(0, 200), min_size=1, max_size=60))
            sequences.append(sorted(found))
    return heads, kv_heads, window, sequences, draw(st.integers(0, 1 << 30))


@settings(max_examples=40, deadline=None)
@given(_cases(), st.sampled_from((None, 0.1, 1.0)), st.sampled_from((0.0, 0.5, 30.0)))
def test_any_rows_on_any_pages(
    case: tuple[int, int, int | None, list[list[int]], int], scale: float | None, cap: float
) -> None:
    """Rows at any positions find what the formula finds; pages no row sees are absent, other slots hold garbage."""
    heads, kv_heads, window, sequences, seed = case
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spec = _spec(heads, kv_heads, window)
    spec = dataclasses.replace(spec, score_scale=scale, score_cap=cap)
    free = list(range(100))
    draw.shuffle(free)
    pool = _pool(spec, 100)
    queries, keys, values = [], [], []
    for positions in sequences:
        length = positions[-1] + 1
        keys.append(torch.randn(LAYERS, length, kv_heads, DIM))
        values.append(torch.randn(LAYERS, length, kv_heads, DIM))
        needed = {
            page
            for each in positions
            for page in range(
                (0 if window is None else max(0, each - window + 1)) // PAGE, each // PAGE + 1
            )
        }
        table = [free.pop() if page in needed else -1 for page in range(length // PAGE + 1)]
        queries.append(Query(positions, [table]))
        new = set(positions)
        for layer in range(LAYERS):
            for at in range(length):
                page = table[at // PAGE]
                visible = page >= 0 and at not in new
                if visible:  # earlier steps' K and V, by the layout of a page
                    pool.data[page, layer, 0, :, at % PAGE] = keys[-1][layer, at]
                    pool.data[page, layer, 1, :, at % PAGE] = values[-1][layer, at]
    plan = plan_groups(queries, [pool])
    rows = sum(len(positions) for positions in sequences)
    packed = _pool(spec, 100, packed=True)
    packed.data.copy_(pack(pool.data))

    for layer in range(LAYERS):
        q = torch.randn(rows, heads, DIM)
        for each in (pool, packed):
            each.write(
                layer,
                plan[0].slots,
                torch.cat(
                    [k[layer, query.positions] for k, query in zip(keys, queries, strict=True)]
                ),
                torch.cat(
                    [v[layer, query.positions] for v, query in zip(values, queries, strict=True)]
                ),
            )
        assert torch.equal(unpack(packed.data), pool.data)
        found = [paged_attention(q, each, layer, plan[0]) for each in (pool, packed)]
        found += [attend(each, q, packed, layer, queries, threads=2) for each in KERNELS]
        if TRITON is not None and layer == 0:
            blocks = TRITON.plan_blocks(queries, [pool], heads // kv_heads)[0]
            found.append(TRITON.paged_attention(q, pool, layer, blocks))
        at = 0
        for query, k, v in zip(queries, keys, values, strict=True):
            for position in query.positions:
                expected = _formula(q[at], k[layer], v[layer], position, window, scale, cap)
                for one in found:
                    assert torch.allclose(one[at].double(), expected, atol=1e-5)
                at += 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [6, 16, 64, 100, 128])
def test_pages_of_sixteen_bits(dtype: torch.dtype, dim: int) -> None:
    """Heads of any width in 16-bit pages, in every build of the kernels: the formula, as far as 16 bits go."""
    torch.manual_seed(dim)
    heads, kv_heads, length = 6, 2, 700  # three chunks: they are merged
    spec = dataclasses.replace(_spec(heads, kv_heads, None), head_dim=dim)
    pool, packed = _pool(spec, 30, dtype), _pool(spec, 30, dtype, packed=True)
    keys, values = torch.randn(2, length, kv_heads, dim).to(dtype)
    query = Query([length - 3, length - 1], [list(range(29, 29 - (length // PAGE + 1), -1))])
    whole = Query(list(range(length)), query.pages)
    slots = plan_groups([whole], [pool])[0].slots
    for each in (pool, packed):
        each.write(1, slots, keys, values)
    q = torch.randn(2, heads, dim)

    found = [attend(each, q, packed, 1, [query], threads) for each in KERNELS for threads in (1, 9)]

    for row, position in enumerate(query.positions):
        expected = _formula(q[row].to(dtype), keys, values, position, None)
        for one in found:
            assert torch.allclose(one[row].double(), expected, atol=4e-3)
    if TRITON is not None:
        blocks = TRITON.plan_blocks([query], [pool], heads // kv_heads)[0]
        assert blocks.chunks > 1
        by_triton = TRITON.paged_attention(q, pool, 1, blocks)
        assert torch.allclose(by_triton, found[0], atol=4e-3)
    # In two parts, as if one half of the pages lay elsewhere.
    for kernels, both in zip(KERNELS, found[::2], strict=True):
        parts = []
        for half in (0, 1):
            (table,) = query.pages
            some = [page if number % 2 == half else -1 for number, page in enumerate(table)]
            parts.append(attend_partly(kernels, q, packed, 1, [Query(query.positions, [some])], 1))
        joined = merge(*parts)
        # weights are rounded to bf16 beside those pages, so relative to another largest score
        near = 4e-3 if dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(joined.sums / joined.row_sum[..., None], both, atol=near)
    for one, nine in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(one, nine)  # however the chunks were shared out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_pages(dtype: torch.dtype) -> None:
    """Keys lie by dims and values by tokens, neighbours of bf16 together; what was packed is unpacked; rows clear."""
    spec, unit = _spec(4, 2, None), 2 if dtype == torch.bfloat16 else 1
    plain = torch.randn(3, LAYERS, 2, 2, PAGE, DIM).to(dtype)

    packed = pack(plain)

    assert torch.equal(unpack(packed), plain)
    keys = packed[1, 1, 0, 1].view(DIM // unit, PAGE, unit)
    values = packed[1, 1, 1, 1].view(PAGE // unit, DIM, unit)
    for token, dim in ((0, 0), (5, 3), (31, 7)):
        assert keys[dim // unit, token, dim % unit] == plain[1, 1, 0, 1, token, dim]
        assert values[token // unit, dim, token % unit] == plain[1, 1, 1, 1, token, dim]
    pool = _pool(spec, 3, dtype, packed=True)
    pool.data.copy_(packed)
    pool.clear(pool.slots(torch.tensor([1]), torch.tensor([5])))
    plain[1, :, :, :, 5] = 0
    assert torch.equal(unpack(pool.data), plain)


def test_pages_of_another_layout_are_refused() -> None:
    """The compiled kernels and Triton's name a pool that they cannot read."""
    spec, query = _spec(2, 1, None), Query([5], [[0]])
    q = torch.randn(1, 2, DIM)
    for kernels in KERNELS:
        with pytest.raises(ValueError, match="packed pages; these are plain"):
            attend(kernels, q, _pool(spec, 1), 0, [query], 1)
    if TRITON is not None:
        with pytest.raises(ValueError, match="plain pages; these are packed"):
            TRITON.plan_blocks([query], [_pool(spec, 1, packed=True)], 2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from((1, 2, 5)),
    st.sampled_from(((4, 4), (8, 2), (6, 1))), st.integers(0, 1 << 30),
)  # fmt: skip
def test_a_row_is_the_same_beside_any_others(
    pages: list[int], rows: int, of: tuple[int, int], seed: int
) -> None:
    """However heads, chunks and sequences are shared out to threads, a row gets the bits it gets alone."""
    torch.manual_seed(seed)
    (heads, kv_heads), dtype = of, (torch.bfloat16, torch.float32)[seed % 2]
    pool = _pool(_spec(heads, kv_heads, None), sum(pages), dtype, packed=True)
    pool.data.copy_(torch.randn(pool.data.shape))
    free = iter(range(sum(pages)))
    queries = []
    for count in pages:
        last = count * PAGE - 1 - seed % PAGE
        table = [[next(free) for _ in range(count)]]
        queries.append(Query(list(range(max(0, last - rows + 1), last + 1)), table))
    q = torch.randn(sum(len(query.positions) for query in queries), heads, DIM)
    for kernels in KERNELS:
        together = attend(kernels, q, pool, 1, queries, threads=1)
        shared = attend(kernels, q, pool, 1, queries, threads=3)
        layers = attend_layers(kernels, q, pool, queries, threads=2)

        assert torch.equal(shared, together)
        assert torch.equal(layers[1], together)
        at = 0
        for query in queries:
            for position in query.positions:
                alone = Query([position], query.pages)
                row = attend(kernels, q[at : at + 1], pool, 1, [alone], threads=2)
                assert torch.equal(row[0], together[at])
                at += 1


def test_more_rows_than_a_block() -> None:
    """A long run of rows is cut into blocks, each with its own mask, and nothing is lost at the borders."""
    torch.manual_seed(1)
    length = 2 * BLOCK_ROWS + 70
    spec = _spec(4, 2, 300)
    pool = _pool(spec, 40)
    query = Query(list(range(length)), [list(range(length // PAGE + 1))])
    plan = plan_groups([query], [pool])
    q = torch.randn(length, 4, DIM)
    keys, values = torch.randn(2, length, 2, DIM)
    pool.write(1, plan[0].slots, keys, values)

    found = paged_attention(q, pool, 1, plan[0])

    for position in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS, length - 1):
        expected = _formula(q[position], keys, values, position, 300)
        assert torch.allclose(found[position].double(), expected, atol=1e-5)


def test_triton_is_there() -> None:
    """The tests above include the CUDA kernel only where Triton's interpreter can run it."""
    if TRITON is None:
        pytest.skip("Triton is not installed (make setup-full)")


@pytest.mark.parametrize(
    ("positions", "table", "window", "complaint"),
    [
        ([3, 3], [0], None, "positions must rise"),
        ([], [0], None, "positions must rise"),
        ([-1, 3], [0], None, "positions must rise"),
        ([40], [0], None, "position 40 has no page"),
        ([40], [-1, 0], None, "position 40 sees a page of group 0 that is not resident"),
        ([40], [-1, 0], 10, "position 40 sees a page of group 0 that is not resident"),
        ([70], [0, -1, 1], 40, "position 70 sees a page"),
        ([5], [9], None, "page 9 of group 0 does not exist"),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(
    positions: list[int], table: list[int], window: int | None, complaint: str
) -> None:
    """A scheduler's error is named, rather than computed with."""
    pool = _pool(_spec(2, 1, window), 4)

    with pytest.raises(ValueError, match=complaint):
        plan_groups([Query(positions, [table])], [pool])


def test_decode_rows_of_like_length_share_a_part() -> None:
    """Thirty-two decode rows become a handful of parts, and hardly a page is read for nothing."""
    pool = _pool(_spec(2, 1, None), 400)
    draw = random.Random(1)
    lengths = [draw.randrange(200, 400) for _ in range(32)]
    free = iter(range(400))
    queries = [
        Query([length], [[next(free) for _ in range(length // PAGE + 1)]]) for length in lengths
    ]

    parts = plan_groups(queries, [pool])[0].parts

    read = sum(len(part.blocks) for part in parts)
    assert len(parts) <= 4
    assert read <= 1.25 * sum(length // PAGE + 1 for length in lengths)
