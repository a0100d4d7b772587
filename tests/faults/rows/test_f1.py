"""kill -9 of every process under load, at a reduced count; `make soak` runs the full one."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from chaos import f1

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 240)
async def test_nothing_accepted_is_lost(tmp_path: Path, seed: int) -> None:
    """Each process is killed twice, not waiting for others to heal; every request ends right."""
    print(f"seed {seed}")
    plan = f1.Plan(kills=20 if SOAK else 2, seed=seed, overlap=not SOAK, simulated=not SOAK)
    result = await f1.run(plan, tmp_path)

    assert result.wrong == []
    assert result.late == []
    assert len(result.kills) == plan.kills * 6
    assert min(result.operations.values()) > 0


def test_interrupted_run_goes_on(tmp_path: Path) -> None:
    """What the partial file holds counts as found, and the order of the rest stays the same."""
    plan, partial = f1.Plan(kills=2, seed=7), tmp_path / "F1.partial"
    done = [f1.Kill(name, 1, 1.0, 1.0, 1.0, 6.0) for name in plan.order()[:3]]
    found = f1.Result(done, {"embed": 3}, 4, {"bus_down": 1}, ["lost"], 3)
    partial.write_bytes(msgspec.json.encode(found))

    assert f1.read_partial(partial) == found
    assert f1.read_partial(tmp_path / "none") == f1.read_partial(None) == f1.Result()
    assert plan.order() == f1.Plan(kills=2, seed=7).order()
    assert sorted(plan.order()) == sorted(2 * list(plan.scene.victims))
