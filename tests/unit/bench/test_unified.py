"""Unified steps against prompts first, simulated: the same requests, sound state, and which is sooner."""

from __future__ import annotations

import pytest

from bench.simulation import unified as module
from bench.simulation.unified import LARGE, PREFILL_FIRST, SHAPE, UNIFIED, TurnSimulation, unified
from bench.workloads.turns import AskedTurn
from common.pages.identity import PAGE
from engine.decoder import scheduler as scheduling
from engine.decoder.scheduler import ScheduledRows

WAYS = pytest.mark.parametrize("prefill_first", [False, True])


def _run(simulation: TurnSimulation) -> dict[tuple[int, int], AskedTurn]:
    while simulation.step() is not None:
        pass
    return simulation.asked


class _Memory:
    """What each place of each page holds: a position of a conversation, which is all its content depends on."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[str, int]] = {}

    def compute(self, part: ScheduledRows) -> None:
        """Write the part's rows; AssertionError if its last row would see a position that is not there."""
        sequence = part.sequence
        for at in part.positions:
            self._held[sequence.pages[0][at // PAGE], at % PAGE] = sequence.job, at
        for at in range(part.positions[-1] + 1):
            assert self._held[sequence.pages[0][at // PAGE], at % PAGE] == (sequence.job, at)


@WAYS
@pytest.mark.parametrize("pages", [SHAPE.pages, 66])
def test_state_stays_sound(
    pages: int, *, prefill_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row sees its own conversation though others sit steps out and pages run short; at the end none is held."""
    monkeypatch.setattr(module, "SHAPE", SHAPE._replace(pages=pages))
    monkeypatch.setattr(scheduling, "RESERVE", 0.0)  # else hardly any sequence loses its pages
    simulation, memory = TurnSimulation(6.0, 10.0, 7, prefill_first=prefill_first), _Memory()
    scheduler = simulation.scheduler
    commit = scheduler.commit

    def checked(part: ScheduledRows, token: int | None) -> None:
        memory.compute(part)
        commit(part, token)

    monkeypatch.setattr(scheduler, "commit", checked)
    while simulation.step() is not None:
        scheduler.check()
    scheduler.drop([*scheduler.running, *scheduler.waiting])
    scheduler.check()

    assert [pool.used for pool in scheduler.table.pools] == [0]
    assert (scheduler.preemptions > 0) is (pages < SHAPE.pages)


@WAYS
def test_prompts_and_answers_share_steps_only_if_unified(*, prefill_first: bool) -> None:
    """With prompts first no step computes several rows of one sequence beside the row of an answer."""
    simulation = TurnSimulation(3.0, 10.0, 7, prefill_first=prefill_first)
    mixed = 0
    while (parts := simulation.step()) is not None:
        prompts = any(len(part.positions) > 1 for part in parts)
        answers = any(part.positions[0] >= len(part.sequence.prompt) for part in parts)
        mixed += prompts and answers

    assert (mixed > 0) is not prefill_first


def test_both_ways_get_the_same_requests() -> None:
    """A turn has the same prompt and as many tokens in both, and each answer is as long as was wanted."""
    one, other = (_run(TurnSimulation(4.0, 15.0, 3, prefill_first=way)) for way in (False, True))
    both = one.keys() & other.keys()

    assert len(both) > 100
    for key in both:
        assert (one[key].prompt, one[key].wanted) == (other[key].prompt, other[key].wanted)
        if key[1] == 0:
            assert one[key].due_s == other[key].due_s
    for asked in (*one.values(), *other.values()):
        assert (
            asked.tokens == asked.wanted
            if asked.done_s is not None
            else asked.tokens < asked.wanted
        )


def test_the_same_seed_gives_the_same_points() -> None:
    """Nothing but the seed decides; another seed gives others."""
    first = unified([1.0, 3.0], 6.0, 5)

    assert first == unified([1.0, 3.0], 6.0, 5)
    assert first != unified([1.0, 3.0], 6.0, 6)
    assert [point.rate for point in first[UNIFIED]] == [1.0, 3.0]


def test_both_keep_up_with_a_low_rate() -> None:
    """All turns sent up to some seconds before the end are answered in both, and they are the same ones."""
    seconds, last_s = 40.0, 8.0
    one, other = (_run(TurnSimulation(0.5, seconds, 2, prefill_first=way)) for way in (False, True))
    early = {key for key, asked in one.items() if asked.due_s < seconds - last_s}

    assert len(early) > 20
    for asked in (one, other):
        assert all(key in asked and asked[key].done_s is not None for key in early)
    assert not any(asked.code for asked in (*one.values(), *other.values()))


def test_unified_steps_are_sooner_at_a_high_rate() -> None:
    """Where a step costs much beside its rows, unified ones answer more turns, each token of them sooner."""
    found = unified([4.0], 40.0, 2, LARGE)
    (ours,), (theirs,) = found[UNIFIED], found[PREFILL_FIRST]

    assert ours.normalized_s < theirs.normalized_s
    assert ours.turns_per_s > theirs.turns_per_s
