"""kill -9 of any process under everything at once, at a reduced count; `spillway bench F1A` is the full one."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import f1
from chaos.scenes import ALL

KINDS = {"embed", "parcels", "search", "ingest", "stream", "conversation", "grounded"}


@pytest.mark.timeout(180)
async def test_nothing_is_lost_under_everything_at_once(tmp_path: Path, seed: int) -> None:
    """Three kills under all kinds of load; every answer is the undisturbed one, documents are there."""
    print(f"seed {seed}")
    plan = f1.Plan(ALL, seed=seed, overlap=True, simulated=True, clients_a_kind=2, total=3)
    result = await f1.run(plan, tmp_path)

    assert result.wrong == []
    assert [kill.victim for kill in result.kills] == plan.order()
    assert set(result.operations) == KINDS
    assert min(result.operations.values()) > 0
    assert min(kill.open_requests for kill in result.kills) >= f1.OPEN
    assert result.sequences > 0
    assert [each for each in result.differences if not each.allowed] == []


def test_kills_go_round_over_all_processes() -> None:
    """Whatever the count, each process is killed as often as any other, or once less."""
    for total in (3, 8, 100):
        order = f1.Plan(ALL, seed=5, total=total).order()
        times = [order.count(name) for name in ALL.victims]
        assert sum(times) == total
        assert max(times) - min(times) <= 1
    assert {name.split("-")[0] for name in ALL.victims} == {
        "router", "gpu_worker", "cpu_worker", "vector_search", "kv_store", "redis",
    }  # fmt: skip
