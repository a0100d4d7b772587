"""Conversations while workers, the keeper and both Redis die; `spillway bench F1P` is the full count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import f1
from chaos.scenes import CONVERSATIONS

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 180)
async def test_every_transcript_is_the_undisturbed_one(tmp_path: Path, seed: int) -> None:
    """In exact mode no token of any turn differs, greedy or drawn, while pages go down to Redis."""
    print(f"seed {seed}")
    kills = 20 if SOAK else 1
    plan = f1.Plan(
        CONVERSATIONS, kills, seed, overlap=not SOAK, simulated=not SOAK, clients_a_kind=6
    )
    result = await f1.run(plan, tmp_path)

    assert result.wrong == []
    assert result.late == []
    assert result.differences == []
    assert len(result.kills) == plan.kills * len(CONVERSATIONS.victims)
    assert result.sequences > 0
    assert result.tiers['spillway_pages_found_total{tier="device"}'] > 0
    assert result.tiers['spillway_page_move_bytes_total{move="put"}'] > 0
