"""SIGTERM with requests in flight: a drain cuts nothing short."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import f4

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 120)
async def test_drain_cuts_nothing_short(tmp_path: Path) -> None:
    """A router, then a worker, ends by SIGTERM with 50 requests in flight; all 50 are answered whole."""
    rounds = 20 if SOAK else 1
    drains = await f4.run(rounds, tmp_path)

    assert [drain.victim for drain in drains] == ["router-1", "gpu_worker-1"] * rounds
    for drain in drains:
        assert drain.cut == {}
        assert drain.whole == f4.IN_FLIGHT
        assert drain.exit_code == 0
