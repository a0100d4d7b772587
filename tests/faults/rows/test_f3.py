"""One hung worker of two: the others' requests go on, its own are done by somebody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import f3

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 120)
async def test_hung_worker_holds_nothing_up(tmp_path: Path) -> None:
    """Every request is answered although a worker is stopped; what it had taken is reclaimed in time."""
    for found in await f3.run(10 if SOAK else 1, 6.5, 1, tmp_path, calm_s=1.0):
        assert found.failed == {}
        assert len(found.others_s) > 10 * len(found.stuck_s)
        assert max(found.stuck_s, default=0.0) < f3.ENDED_S + 3.0
