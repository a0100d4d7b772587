"""Bytes of every tier of pages, at a reduced count; `spillway bench F5P` has 10,000 turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import f5_pages
from chaos.f5_pages import BUDGETS


@pytest.mark.timeout(120)
async def test_no_tier_is_larger_than_its_budget(tmp_path: Path, seed: int) -> None:
    """While conversations wander through small tiers none fails, and each tier stays within its bytes."""
    print(f"seed {seed}")
    found = await f5_pages.run(80, tmp_path, seed)
    tiers = found.memory.tiers

    assert found.failed == {}
    assert found.turns > 0
    assert set(tiers) == set(BUDGETS)
    assert all(max(sizes) <= 1.1 * BUDGETS[tier] for tier, sizes in tiers.items())
    assert set(found.memory.used) == {"redis", "redis-pages"}
    assert found.counted['spillway_pages_found_total{tier="device"}'] > 0
