"""What chat figures mean: every quantity from known moments, goodput at its limits, scripts from their seed."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.chat.frames import Frame, Frames
from loadgen.chat.replies import Goal, Reply, summary
from loadgen.chat.scripts import Lengths, ScriptShape, scripts


def _reply(**given: object) -> Reply:
    base: dict[str, object] = {
        "kind": "chat", "turn": 0, "due_s": 1.0, "sent_s": 1.1, "done_s": 3.0, "status": 200,
        "first_s": 1.5, "output_tokens": 4, "prompt_tokens": 7, "gaps_s": (0.5, 0.5, 0.5),
    }  # fmt: skip
    return Reply(**{**base, **given})  # type: ignore[arg-type]


def test_known_moments_give_known_figures() -> None:
    """TTFT and latency count from when it was due, TPOT over the tokens after the first."""
    found = _reply()

    assert (found.ttft_s, found.tpot_s, found.latency_s) == (0.5, 0.5, 2.0)
    assert found.normalized_s == 0.5


def test_answers_without_a_token_have_no_such_figure() -> None:
    """Nothing is divided by zero: a failed answer has no TTFT, one token no TPOT."""
    failed = _reply(status=503, code="no_worker", first_s=None, output_tokens=0, gaps_s=())

    assert (failed.ttft_s, failed.tpot_s, failed.normalized_s) == (None, None, None)
    assert _reply(output_tokens=1).tpot_s is None


def test_goodput_counts_whole_answers_within_both_limits() -> None:
    """One late first token, one slow stream, one error and one right answer: one is goodput."""
    replies = [
        _reply(),
        _reply(first_s=2.5, done_s=3.0),
        _reply(done_s=9.0),
        _reply(status=0, code="cut"),
        _reply(status=429, code="depth", first_s=None),
    ]
    found = summary(replies, 2.0, Goal(ttft_s=1.0, tpot_s=0.6), cpu_s=0.1)

    assert found["goodput_per_s"] == 0.5
    assert found["within_goal"] == 0.2
    assert (found["ok"], found["refused"], found["errors"]) == (3, 1, 1)
    assert found["codes"] == {"cut": 1, "depth": 1}
    assert found["output_tokens_per_s"] == 6.0
    assert found["itl_s"]["p90"] == 0.5


def test_limits_themselves_are_met() -> None:
    """An answer exactly at its limits counts, one token meets any TPOT, an error meets nothing."""
    assert _reply().meets(Goal(0.5, 0.5))
    assert not _reply().meets(Goal(0.5, 0.49))
    assert not _reply().meets(Goal(0.49, 0.5))
    assert _reply(output_tokens=1).meets(Goal(0.5, 0.0))
    assert not _reply(code="wrong_stream").meets(Goal(9, 9))


def test_summary_of_nothing() -> None:
    """No request gives zeros and no percentiles, not an error."""
    found = summary([], 0.0, Goal())

    assert (found["requests"], found["goodput_per_s"], found["ttft_s"]) == (0, 0.0, {})


@pytest.mark.parametrize(("mean", "sigma"), [(38.0, 1.0), (205.0, 0.7)])
def test_lengths_have_their_mean(mean: float, sigma: float) -> None:
    """The drawn lengths have the mean asked for, not the log-normal's median."""
    import random

    rng = random.Random(1)
    drawn = [Lengths(mean, sigma, 1_000_000).draw(rng) for _ in range(20_000)]

    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)


def test_scripts_follow_shape_and_seed() -> None:
    """The same seed gives the same conversations; turns have their mean, the first has no pause."""
    shape = ScriptShape(turns=3.0, think_s=2.0)
    found = list(itertools.islice(scripts(shape, 7), 2000))

    assert found[:50] == list(itertools.islice(scripts(shape, 7), 50))
    assert found[:50] != list(itertools.islice(scripts(shape, 8), 50))
    assert statistics.fmean(len(s.says) for s in found) == pytest.approx(3.0, rel=0.1)
    assert {s.says[0].think_s for s in found} == {0.0}
    later = [say.think_s for s in found for say in s.says[1:]]
    assert statistics.fmean(later) == pytest.approx(2.0, rel=0.1)
    assert all(len(s.says) == 1 for s in itertools.islice(scripts(ScriptShape(turns=1.0), 1), 100))


@given(
    frames=st.lists(
        st.tuples(st.integers(0, 99), st.text(st.characters(codec="utf-8"), min_size=1))
    ),
    cuts=st.lists(st.integers(1, 40)),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_frames_are_found_however_they_are_cut(
    frames: list[tuple[int, str]], cuts: list[int], newline: str
) -> None:
    """Whatever the sizes in which bytes arrive, the same frames come out, and pings are no frames."""
    clean = [(number, text.replace("\r", " ").replace("\n", " ")) for number, text in frames]
    told = "".join(f"id: {n}.0\ndata: {text}\n\n: ping\n\n" for n, text in clean)
    raw = told.replace("\n", newline).encode()
    reader, found = Frames(), list[Frame]()
    sizes = itertools.chain(cuts, itertools.repeat(17))
    while raw:
        size = next(sizes)
        found += reader.feed(raw[:size])
        raw = raw[size:]

    assert found == [Frame(text.encode(), f"{n}.0") for n, text in clean]
    assert reader.pings == len(clean)
