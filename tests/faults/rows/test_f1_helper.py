"""Conversations while the gpu_worker and the helper that attends for it die; `make soak` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import f1
from chaos.scenes import HELPED
from chaos.tiers import ATTENDED


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_every_transcript_is_the_undisturbed_one(tmp_path: Path, seed: int) -> None:
    """No token of any turn differs, greedy or drawn, whoever attended: the helper, or the worker that it left."""
    print(f"seed {seed}")
    plan = f1.Plan(HELPED, 20, seed, clients_a_kind=6)
    result = await f1.run(plan, tmp_path)

    assert result.wrong == []
    assert result.late == []
    assert result.differences == []
    assert len(result.kills) == plan.kills * len(HELPED.victims)
    assert result.sequences > 0
    assert result.tiers[f'{ATTENDED}{{by="helper"}}'] > 0
    assert result.tiers[f'{ATTENDED}{{by="late"}}'] > 0
