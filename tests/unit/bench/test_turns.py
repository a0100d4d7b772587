"""P1's load: conversations of the published statistics, and figures from known turns."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.conversations import (
    ANSWER_TOKENS,
    ORDINARY,
    PAST_ANSWER_S,
    PROMPT_TOKENS,
    Scale,
    Turn,
    conversations,
    under_way,
)
from bench.workloads.turns import AskedTurn, Point, System, at_limit, ninetieth, point

WIDE = Scale(lengths=1, pauses=20, context=1_000_000)


def test_conversations_have_the_published_means() -> None:
    """Turns, tokens of both sides and pauses are ShareGPT's in the mean, where no context cuts them."""
    some = list(itertools.islice(conversations(WIDE, 1000, 1), 4000))
    turns = [turn for each in some for turn in each]

    assert statistics.fmean(map(len, some)) == pytest.approx(5.56, rel=0.1)
    assert statistics.fmean(len(t.tokens) for t in turns) == pytest.approx(PROMPT_TOKENS, rel=0.05)
    assert statistics.fmean(t.wanted for t in turns) == pytest.approx(ANSWER_TOKENS, rel=0.05)
    assert statistics.fmean(t.think_s for each in some for t in each[1:]) == pytest.approx(3, 0.05)


@given(seed=st.integers(0, 1000), context=st.integers(64, 4096), lengths=st.floats(1, 16))
def test_no_conversation_is_longer_than_the_context(
    seed: int, context: int, lengths: float
) -> None:
    """All tokens of a conversation fit, none is special, and the same seed says the same."""
    scale = Scale(lengths, 20, context)
    first = list(itertools.islice(conversations(scale, 100, seed), 20))

    assert first == list(itertools.islice(conversations(scale, 100, seed), 20))
    for turns in first:
        assert sum(len(turn.tokens) + turn.wanted for turn in turns) <= context
        assert all(ORDINARY <= token < 100 for turn in turns for token in turn.tokens)
        assert all(turn.think_s == 0 for turn in turns[:1])


@given(seed=st.integers(0, 100), context=st.integers(128, 4096))
def test_those_under_way_go_on_in_the_middle(seed: int, context: int) -> None:
    """Their history is that of the turns behind them, the next one is due at once or after a pause, and all fits."""
    scale = Scale(4, 20, context)
    begun = under_way(scale, 100, seed, 2.0)

    assert begun == under_way(scale, 100, seed, 2.0)
    for each in begun:
        assert (len(each.history) > 0) is (each.past > 0)
        assert each.turns[0].think_s >= 0
        assert all(ORDINARY <= token < 100 for token in each.history)
        rest = sum(len(turn.tokens) + turn.wanted for turn in each.turns)
        assert len(each.history) + rest <= context


def test_as_many_are_under_way_as_arrive_while_one_lasts() -> None:
    """Little's law, over the time until the last turn is said."""
    scale, rate = Scale(4, 20, 4096), 5.0
    lasting = [
        sum(turn.think_s + PAST_ANSWER_S for turn in turns) - PAST_ANSWER_S
        for turns in itertools.islice(conversations(scale, 100, 7), 4000)
        if turns
    ]
    found = [len(under_way(scale, 100, seed, rate)) for seed in range(20)]

    assert statistics.fmean(found) == pytest.approx(rate * statistics.fmean(lasting), rel=0.15)


def test_what_forgets_says_another_beginning_each_time() -> None:
    """Only the first two tokens differ, and a prompt of words is the same as one of ids."""
    turn = next(conversations(WIDE, 1000, 3))[0]
    history = list(range(100, 140))
    rng = random.Random(5)
    bodies = [System("", 1000, forget=True).body(history, turn, rng)["prompt"] for _ in range(9)]
    plain = System("", 1000).body(history, turn, rng)["prompt"]
    words = System("", 1000, words=True).body(history, turn, rng)["prompt"]

    assert len({tuple(body[:2]) for body in bodies}) == 9
    assert all(body[2:] == plain[2:] for body in bodies)
    assert words == "".join(f"w{token}" for token in plain)


def _asked(due_s: float, seconds: float | None, tokens: int = 10, code: str = "") -> AskedTurn:
    done_s = None if seconds is None else due_s + seconds
    ended = 0 if seconds is None else tokens
    return AskedTurn(due_s, 0, 5, tokens, due_s + 0.1, done_s, ended, code)


def test_figures_of_known_turns() -> None:
    """What began in the warm-up counts for no latency, what ended in it for no throughput."""
    warm = [_asked(0.0, 0.5), _asked(0.5, 1.0)]
    found = point([*warm, *(_asked(2.0, n / 10) for n in range(1, 11))], 3.0, 1.0, 11.0)

    assert (found.count, found.failed) == (10, 0)
    assert found.turns_per_s == pytest.approx(1.1)
    assert found.tokens_per_s == pytest.approx(11)
    assert found.normalized_s == pytest.approx(0.09)
    assert found.first_s == pytest.approx(0.1)


def test_open_and_failed_turns_are_not_forgotten() -> None:
    """An open turn counts once it took longer than the others, a failed one is infinitely late."""
    ended = [_asked(1.0, 1.0) for _ in range(10)]

    assert point([*ended, _asked(10.0, None)], 1, 0, 10.5).normalized_s == pytest.approx(0.1)
    assert point([*ended, *[_asked(1.0, None)] * 2], 1, 0, 11).normalized_s == pytest.approx(1.0)
    assert point([*ended, *[_asked(1.0, 1.0, code="x")] * 2], 1, 0, 11).normalized_s == math.inf


def test_percentile_is_one_of_the_values() -> None:
    """Nearest rank; infinite where there is nothing."""
    assert ninetieth(range(1, 11)) == 9
    assert ninetieth([7]) == 7
    assert ninetieth([]) == math.inf


def _point(rate: float, latency: float) -> Point:
    return Point(rate, 2 * rate, 20 * rate, latency, 0.0, 1, 0)


def test_throughput_at_the_limit_is_interpolated() -> None:
    """Between the last rate within the limit and the first above it; of no rate within it, nothing."""
    points = [_point(1, 0.1), _point(2, 0.2), _point(4, 0.4)]

    turns, tokens, reached = at_limit(points, 0.3)
    assert (turns, tokens) == pytest.approx((6, 60))
    assert reached is True
    assert at_limit(points, 0.5) == (8, 80, False)
    assert at_limit(points, 0.05) == (0, 0, True)
    assert at_limit([_point(1, 0.1), _point(2, math.inf)], 0.3) == (2, 20, True)


@given(seed=st.integers(0, 50))
def test_other_words_are_said_by_the_same_conversations(seed: int) -> None:
    """Lengths and pauses are those of the seed, whatever words are said, and no conversation says the same."""
    scale = Scale(4, 20, 4096)

    def shape(turns: list[Turn]) -> list[tuple[float, int, int]]:
        return [(turn.think_s, len(turn.tokens), turn.wanted) for turn in turns]

    first, other = (
        list(itertools.islice(conversations(scale, 5000, seed, words), 10)) for words in (1, 2)
    )
    assert [shape(turns) for turns in first] == [shape(turns) for turns in other]
    long = [turn.tokens for turns in first for turn in turns if len(turn.tokens) > 2]
    assert not any(turn.tokens in long for turns in other for turn in turns)


def test_more_conversations_are_under_way_at_a_higher_rate() -> None:
    """The same ones begin at every rate, closer together: what a rate adds is added to all systems alike."""
    counts = [len(under_way(Scale(4, 20, 4096), 100, 3, rate)) for rate in (0.5, 1.0, 2.0, 4.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
