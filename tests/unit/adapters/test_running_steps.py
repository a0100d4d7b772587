"""Properties of running steps: the heartbeat is overdue once one of them is, and never before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from common.redis.heartbeat import OVERDUE_S, Heartbeat
from services.adapters.encode.running_steps import RunningSteps
from tests.support.clock import ManualClock

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "questions"]),
        st.booleans(),
        st.floats(0, 5),  # seconds predicted
        st.floats(0, 30),  # seconds until the next event
    ),
    max_size=40,
)


@given(EVENTS)
@example(
    [("questions", True, 0.0, 0.0), ("batch", True, 0.0, 20.0), ("questions", False, 0.0, 1.0)]
)
def test_overdue_with_any_step(events: list[tuple[str, bool, float, float]]) -> None:
    """It is overdue only if a step is, and at the latest OVERDUE_S after that, whatever runs beside the step."""
    clock = ManualClock()
    heartbeat = Heartbeat("heart", now=clock.monotonic)
    steps = RunningSteps(cast("Any", SimpleNamespace(heartbeat=heartbeat)), clock)
    limits: dict[str, float] = {}
    for name, begins, predicted_s, passes_s in events:
        if begins:
            steps.begin(name, predicted_s)
            limits[name] = clock.monotonic() + max(OVERDUE_S, 5 * predicted_s)
        else:
            steps.end(name)
            limits.pop(name, None)
        clock.now_s += passes_s
        heartbeat.turn()
        now_s, first_s = clock.monotonic(), min(limits.values(), default=float("inf"))
        if heartbeat.overdue:
            assert now_s >= first_s - 1e-6
        if now_s > first_s + OVERDUE_S:
            assert heartbeat.overdue


def test_a_hung_batch_is_found_while_questions_are_answered() -> None:
    """Questions that come and go do not hide a batch that hangs."""
    clock = ManualClock()
    heartbeat = Heartbeat("heart", now=clock.monotonic)
    steps = RunningSteps(cast("Any", SimpleNamespace(heartbeat=heartbeat)), clock)
    steps.begin("batch", 0.2)
    for _ in range(110):
        steps.begin("questions", 0.02)
        clock.now_s += 0.1
        steps.end("questions")
        heartbeat.turn()
    assert heartbeat.overdue
    steps.end("batch")
    assert not heartbeat.overdue
