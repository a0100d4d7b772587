"""Routers and workers as processes that die: the door never lets more in than fits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import r2

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 120)
async def test_use_never_exceeds_depth(tmp_path: Path, seed: int) -> None:
    """Not one admission is over depth, and use always equals the streams' content."""
    print(f"seed {seed}")
    admissions = 1_000_000 if SOAK else 3_000
    found = await r2.run(admissions, seed, tmp_path, r2.Found())

    assert found.over == []
    assert found.differ == []
    assert found.admitted >= admissions
    assert found.audits > 0
