"""The rates of P1's curves: chosen by the latencies so far, around the limits, on a machine of any speed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.document import BenchOptions
from bench.workloads.turn_runs import MOST, NEAR, STEP, TurnRuns, last_within, next_step

LIMITS_S, JUDGED_S = (0.01, 0.02, 0.03, 0.06), 0.03


def _curve(capacity: float, most: int = MOST) -> dict[float, float]:
    """Return the latencies of the rates chosen, at a server that is full at `capacity` times the first rate."""
    found: dict[float, float] = {}
    while (step := next_step(found, LIMITS_S, JUDGED_S, most)) is not None:
        assert step not in found
        load = STEP**step / capacity
        found[step] = 0.005 / (1 - load) if load < 1 else math.inf
    return found


@given(st.floats(0.15, 6.0))
def test_rates_lie_around_the_limits(capacity: float) -> None:
    """One keeps the least limit, one passes the greatest, and those next to the judged limit lie half a step apart."""
    found = _curve(capacity)
    steps = sorted(found)
    within = last_within(found, JUDGED_S)

    assert len(found) <= MOST
    assert found[steps[0]] <= min(LIMITS_S)
    assert found[steps[-1]] > max(LIMITS_S)
    assert steps[steps.index(within) + 1] - within <= NEAR


@given(st.floats(0.001, 1000.0), st.integers(1, MOST))
def test_no_curve_has_more_rates_than_it_may(capacity: float, most: int) -> None:
    """However slow or fast a server is, its curve ends."""
    assert 1 <= len(_curve(capacity, most)) <= most


def test_a_server_far_behind_is_not_asked_at_every_rate() -> None:
    """Where a rate is far above the greatest limit, the next one is two steps lower."""
    assert next_step({0.0: 1.0}, LIMITS_S, JUDGED_S, MOST) == -2
    assert next_step({0.0: 0.07}, LIMITS_S, JUDGED_S, MOST) == -1
    assert next_step({}, LIMITS_S, JUDGED_S, MOST) == 0
    assert next_step({0.0: 0.001}, LIMITS_S, JUDGED_S, MOST) == 1


def test_the_last_rate_within_a_limit_has_none_above_it_before() -> None:
    """A rate above the limit ends what is within; where all are above, the lowest rate is taken."""
    assert last_within({0: 0.01, 1: 0.02, 2: 0.5, 3: 0.02}, 0.03) == 1
    assert last_within({-2: 0.5, -1: 0.7}, 0.03) == -2


@pytest.mark.parametrize(
    ("only", "wanted"), [("", {"S: b #1", "M: a #1"}), ("S:", {"S: b #1"}), (": a", {"M: a #1"})]
)
def test_what_is_named_and_not_yet_known_is_measured(only: str, wanted: set[str]) -> None:
    """What the options name is measured once, whether it was found or not."""
    runs = TurnRuns(BenchOptions(only=only), 1.0)
    runs.kept.points["S: a #1"] = []
    runs.kept.absent["M: b #1"] = "no server"

    assert {
        key for key in ("S: a #1", "S: b #1", "M: a #1", "M: b #1") if runs.wants(key)
    } == wanted
