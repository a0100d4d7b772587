"""Planned costs beside those of living workers: what is parsed, compared and refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import SearchConfig, WorkerConfig
from common.errors import ConfigError
from common.ids import Family
from common.registry.processes import PRIVATE, shown_settings
from common.wire.registry import WorkerRecord
from planner.deployment import (
    DeploymentPlan,
    MachineFingerprint,
    PlannedCost,
    PlannedPerformance,
    PlannedService,
)
from services.router import metrics
from services.router.mesh.planned_costs import DRIFT, PlannedCosts, parse_planned_costs

CHAT = Family("chat.one")


def worker(seconds: float, name: str = "w") -> WorkerRecord:
    """Return a worker whose batches take so many seconds."""
    return WorkerRecord(name, ["gpu"], "cpu", 1, 1, beta_s=seconds)


@given(
    st.lists(
        st.builds(
            PlannedCost,
            st.sampled_from(("embed", "rerank", "chat", "search")),
            st.floats(1e-7, 1e6).map(lambda value: float(f"{value:.6g}")),
            st.integers(1, 10_000),
            st.integers(0, 10_000),
        ),
        max_size=5,
    )
)
def test_a_plans_costs_are_read_as_it_writes_them(costs: list[PlannedCost]) -> None:
    """What a plan puts into the variable is what the router reads, to six digits."""
    plan = DeploymentPlan(
        machine=MachineFingerprint(1, 0, 0, ""),
        services=[PlannedService("router")],
        predicted=PlannedPerformance(0.0, 0.0),
        costs=costs,
    )
    found = parse_planned_costs(plan.planned_costs())

    assert [(each.kind, each.seconds, each.items, each.tokens) for each in found] == [
        (each.kind, each.seconds, each.items, each.tokens) for each in costs
    ]


@pytest.mark.parametrize(
    "text",
    ["chat", "chat:1:2", "chat:1:2=", "chat:1:2=0", "chat:-1:2=1", "cook:1:1=1", "chat:1:1=1.2.3", "chat:1:1=1e999"],
)  # fmt: skip
def test_what_is_no_cost_is_refused(text: str) -> None:
    """One sentence names the part and what is expected."""
    with pytest.raises(ConfigError, match="SPILLWAY_PLANNED_COSTS holds '"):
        PlannedCosts(f"embed:1:1=1,{text}")


def test_costs_drift_with_the_mean_of_the_workers() -> None:
    """Half as much again, or two thirds, is drift; a kind without workers says nothing; others are not compared."""
    planned = PlannedCosts("chat:1:10=0.1,search:1:0=0.01")
    planned.note(CHAT, [worker(0.1), worker(0.1 * 2 * DRIFT)])
    planned.note(Family("embed.minilm"), [worker(5.0)])
    chat, search = planned.compare()

    assert chat["ratio"] == pytest.approx((1 + 2 * DRIFT) / 2)
    assert chat["drifted"]
    assert search == {
        "kind": "search", "items": 1, "tokens": 0, "seconds": 0.01, "live_s": None, "ratio": None, "drifted": False,
    }  # fmt: skip
    gauge = metrics.PLANNED_COST_RATIO.labels("chat")
    assert gauge._value.get() == pytest.approx(chat["ratio"])
    planned.note(CHAT, [worker(0.11)])
    assert not planned.compare()[0]["drifted"]
    planned.note(CHAT, [])
    assert planned.compare()[0]["ratio"] is None
    assert math.isnan(gauge._value.get())


def test_settings_are_told_without_secrets_and_paths() -> None:
    """What is as by default, private, or the way to a file is not told."""
    config = WorkerConfig(
        data_dir="/home/me",
        redis_url="redis://:secret@host",
        chat_model="/home/me/models/one/",
        max_running=8,
        exact=True,
    )

    assert shown_settings(config) == {
        "SPILLWAY_CHAT_MODEL": "one", "SPILLWAY_MAX_RUNNING": "8", "SPILLWAY_EXACT": "true",
    }  # fmt: skip
    assert shown_settings(SearchConfig()) == {}
    names = {field.name for field in msgspec.structs.fields(WorkerConfig)}
    assert {"redis_url", "pages_url", "data_dir"} <= PRIVATE & names
