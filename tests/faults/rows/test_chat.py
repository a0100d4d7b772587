"""Chat while processes die, are cancelled and drained, at a reduced count; `make soak` runs the full ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import f1, f2, f4
from chaos.scenes import CHAT

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 180)
async def test_no_delivered_token_is_lost_doubled_or_changed(tmp_path: Path, seed: int) -> None:
    """Each process is killed under streams, conversations and grounded questions; every answer is the known one.

    Then the router that drives a grounded request is killed while it embeds, searches, generates.
    """
    print(f"seed {seed}")
    kills = 15 if SOAK else 1
    between = 10 if SOAK else 1
    plan = f1.Plan(CHAT, kills, seed, overlap=not SOAK, simulated=not SOAK, between=between)
    result = await f1.run(plan, tmp_path)

    assert result.wrong == []
    assert result.late == []
    assert result.differences == []
    assert len(result.kills) == plan.kills * len(CHAT.victims)
    assert len(result.stages.kills) == result.stages.sequences == 3 * between
    assert set(result.operations) == {"stream", "conversation", "grounded"}


@pytest.mark.timeout(0 if SOAK else 60)
async def test_stopped_streams_free_what_they_held(tmp_path: Path) -> None:
    """Every cancelled or abandoned stream ends at once, and the worker holds no page and no sequence for it."""
    for stop in await f2.run(20 if SOAK else 1, tmp_path, f2.CHAT):
        assert stop.left == 0
        assert stop.ends == {"cancelled": f2.IN_FLIGHT}
        assert stop.held == {}


@pytest.mark.timeout(0 if SOAK else 90)
async def test_drain_truncates_no_stream(tmp_path: Path) -> None:
    """A router, then a worker, ends by SIGTERM with 50 streams in flight; all 50 come whole."""
    rounds = 20 if SOAK else 1
    for drain in await f4.run(rounds, tmp_path, f4.CHAT):
        assert drain.cut == {}
        assert drain.whole == f4.IN_FLIGHT
        assert drain.exit_code == 0
