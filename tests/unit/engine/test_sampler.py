"""The sampler against a plain, slow one; its distribution; its independence of the batch."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types.generation import SamplingParams
from engine.decoder.executor.interface import SamplingRequest
from engine.decoder.sampling import sampler
from engine.decoder.sampling.philox import philox, uniforms
from engine.decoder.sampling.sampler import draw_tokens

VOCABULARY = 40


class Only:
    """A filter that allows the same tokens after any output."""

    def __init__(self, tokens: frozenset[int]) -> None:
        self.tokens = tokens

    def allowed(self, output: Sequence[int]) -> bytes | None:
        mask = bytearray(VOCABULARY // 8 + 3)  # longer than the vocabulary, as words are
        for token in self.tokens:
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)


def _draw(
    sampling: SamplingParams, position: int = 0, *, choice: int = 0, logprobs: int = -1
) -> SamplingRequest:
    return SamplingRequest(sampling, choice, position, [], [], (), logprobs)


def _slow(logits: list[float], draw: SamplingRequest) -> int:
    """One token at a time, one step after another, in float64."""
    sampling = draw.sampling
    scores = [value + sampling.bias.get(token, 0.0) for token, value in enumerate(logits)]
    if isinstance(draw.grammar, Only):
        for token in set(range(VOCABULARY)) - draw.grammar.tokens:
            scores[token] = -math.inf
    for token in draw.banned:
        scores[token] = -math.inf
    for token in {*draw.prompt, *draw.output}:
        scores[token] *= (1 / sampling.repetition) if scores[token] > 0 else sampling.repetition
    for token, count in Counter(draw.output).items():
        scores[token] -= sampling.frequency * count + sampling.presence
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.temperature == 0:
        return order[0]
    best = max(scores)
    weights = [math.exp((score - best) / sampling.temperature) for score in scores]
    chances = [weight / sum(weights) for weight in weights]
    kept = [token for token in order if chances[token] >= sampling.min_p * max(chances)]
    kept = kept[: sampling.top_k or None]
    mass = sum(chances[token] for token in kept)
    fewest: list[int] = []
    reached = 0.0
    for token in kept:
        if fewest and reached >= sampling.top_p * mass:
            break
        fewest.append(token)
        reached += chances[token]
    if not sampler._cuts(draw):
        fewest = list(range(len(chances)))
    target = uniforms([(sampling.seed, draw.choice, draw.position, 0)])[0]
    target *= sum(chances[token] for token in fewest)
    for token in fewest:
        target -= chances[token]
        if target < 0:
            return token
    return fewest[-1]


_SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.01, 0.5, 1.0, 1.7)),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.01)),
    top_k=st.sampled_from((0, 1, 3, 20, 1000)),
    min_p=st.sampled_from((0.0, 0.02, 0.5, 1.0)),
    presence=st.sampled_from((0.0, 0.7, -0.5)),
    frequency=st.sampled_from((0.0, 0.3)),
    repetition=st.sampled_from((1.0, 1.3, 0.8)),
    seed=st.integers(0, 2**64 - 1),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-9, 9), max_size=3),
)
_TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
_DRAWS = st.builds(
    SamplingRequest,
    sampling=_SAMPLINGS,
    choice=st.integers(0, 5),
    position=st.integers(0, 10_000),
    prompt=_TOKENS,
    output=_TOKENS,
    banned=st.lists(st.integers(0, 5), max_size=2),
    logprobs=st.integers(-1, 4),
    grammar=st.none()
    | st.builds(Only, st.frozensets(st.integers(6, VOCABULARY - 1), min_size=1, max_size=9)),
)


@settings(max_examples=100, deadline=None, derandomize=True)  # rounding decides 1 in 10^5
@given(st.lists(_DRAWS, min_size=1, max_size=6), st.integers(0, 1 << 30), st.sampled_from((4, 64)))
def test_rows_are_drawn_as_by_the_slow_one(
    draws: list[SamplingRequest], seed: int, candidates: int
) -> None:
    """Every mixture of parameters in one batch, whether candidates suffice or everything is sorted."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(draws), VOCABULARY, generator=generator) * 3
    expected = [_slow(row, draw) for row, draw in zip(logits.tolist(), draws, strict=True)]
    raw = torch.log_softmax(logits, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "SMALL", 0 if candidates < VOCABULARY else VOCABULARY)
        patch.setattr(sampler, "CANDIDATES", candidates)

        found = draw_tokens(logits.clone(), draws)

    assert [drawn.token for drawn in found] == expected
    for row, (drawn, draw) in enumerate(zip(found, draws, strict=True)):
        if draw.logprobs < 0:
            assert (drawn.logprob, drawn.top) == (0.0, [])
            continue
        assert drawn.logprob == pytest.approx(float(raw[row, drawn.token]))
        best = raw[row].topk(draw.logprobs) if draw.logprobs else None
        assert [token for token, _ in drawn.top] == (best.indices.tolist() if best else [])


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Alone, among others, and in another order: the same token."""
    draw = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 5000, generator=generator) * 2
    samplings = [
        SamplingParams(
            temperature=draw.choice((0.0, 0.7, 1.3)),
            top_p=draw.choice((1.0, 0.9, 0.9999)),
            top_k=draw.choice((0, 5, 2000)),
            seed=row,
        )
        for row in range(64)
    ]
    draws = [_draw(sampling, row) for row, sampling in enumerate(samplings)]
    together = [drawn.token for drawn in draw_tokens(logits.clone(), draws)]

    alone = [draw_tokens(logits[n : n + 1].clone(), [draws[n]])[0].token for n in range(64)]
    order = draw.sample(range(64), 40)
    shuffled = draw_tokens(logits[order].clone(), [draws[n] for n in order])

    assert alone == together
    assert [drawn.token for drawn in shuffled] == [together[n] for n in order]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """Chi-square over 8,000 positions of one seed: the frequencies are the chances that are left."""
    count = 8_000
    logits = torch.linspace(0, 3, 16)
    draws = [_draw(sampling, position) for position in range(count)]

    found = Counter(each.token for each in draw_tokens(logits.repeat(count, 1), draws))

    chances = torch.softmax(logits.double() / sampling.temperature, -1)
    if sampling.top_k:
        chances[: 16 - sampling.top_k] = 0
    chances[chances < sampling.min_p * chances.max()] = 0
    falling = chances.flip(0)
    chances[(falling.cumsum(0) - falling >= sampling.top_p).flip(0)] = 0
    chances /= chances.sum()
    left = [token for token in range(16) if chances[token] > 0]
    assert set(found) <= set(left)
    test = scipy.stats.chisquare(
        [found[token] for token in left], [float(chances[token]) * count for token in left]
    )
    assert test.pvalue > 1e-3


@pytest.mark.parametrize("changed", ["seed", "choice", "position"])
def test_every_part_of_the_key_counts(changed: str) -> None:
    """Numbers that differ only in one part of the key are uniform and not correlated."""
    parts = {"seed": 0, "choice": 1, "position": 2}
    keys = []
    for number in range(8_000):
        key = [1 << 40, 0, 0, 0]
        key[parts[changed]] += number
        keys.append((key[0], key[1], key[2], key[3]))

    drawn = uniforms(keys)

    assert scipy.stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05
    assert len(set(drawn.tolist())) == len(keys)


def test_philox_known_answers() -> None:
    """The test vectors published with the algorithm (Random123, philox4x32-10)."""
    ones = 0xFFFFFFFF
    counters = [
        [0, 0, 0, 0],
        [ones] * 4,
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
    ]
    keys = [[0, 0], [ones, ones], [0xA4093822, 0x299F31D0]]

    found = philox(np.array(counters, dtype=np.uint64), np.array(keys, dtype=np.uint64))

    assert [[f"{word:08x}" for word in row] for row in found.tolist()] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]


def test_extremes() -> None:
    """The hottest and the coldest temperatures, equal logits, and a single token left."""
    logits = torch.tensor([[1.0, 5.0, 5.0, -3.0]])

    def token(sampling: SamplingParams, banned: tuple[int, ...] = ()) -> int:
        draw = SamplingRequest(sampling, 0, 3, [], [], banned)
        return draw_tokens(logits.clone(), [draw])[0].token

    assert token(SamplingParams(temperature=0.0)) == 1
    assert token(SamplingParams(temperature=1e-30, seed=1)) in {1, 2}
    assert token(SamplingParams(temperature=0.0), (1, 2)) == 0
    assert token(SamplingParams(temperature=2.0), (0, 1, 2)) == 3
    assert token(SamplingParams(temperature=1e6, top_k=1)) in {1, 2}
    assert token(SamplingParams(temperature=1.0, top_p=1e-9)) in {1, 2}
    assert token(SamplingParams(temperature=1.0, bias={3: 100.0})) == 3


def test_nothing_to_draw() -> None:
    """A step that wants no token draws none."""
    assert draw_tokens(torch.empty(0, 4), []) == []
