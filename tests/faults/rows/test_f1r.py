"""Answers that retrieve while they are written, amid kills; `spillway bench F1R` is the full count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.suites.f1r import CLIENTS
from chaos import f1
from chaos.clients import Done
from chaos.pipelined import REPLACED, RETRIEVALS, amid_retrievals
from chaos.scenes import PIPELINED

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 180)
async def test_no_retrieval_differs(tmp_path: Path, seed: int) -> None:
    """Whoever dies between, during or after retrievals: text, citations and passages are the undisturbed run's."""
    print(f"seed {seed}")
    kills = 20 if SOAK else 1
    plan = f1.Plan(
        PIPELINED, kills, seed, overlap=not SOAK, simulated=not SOAK, clients_a_kind=CLIENTS
    )
    result = await f1.run(plan, tmp_path)

    assert result.wrong == []
    assert result.late == []
    assert result.differences == []
    assert len(result.kills) == plan.kills * len(PIPELINED.victims)
    assert min(kill.open_requests for kill in result.kills) >= plan.open
    assert result.sequences >= len(result.kills)


def test_which_answers_are_amid_their_retrievals() -> None:
    """One whose passages were replaced, and that has a retrieval left."""
    first: dict[str, Any] = {"replaced": []}
    other: dict[str, Any] = {"replaced": [1]}
    told = {
        "begun": [first],
        "same": [first, first],
        "amid": [first, other],
        "over": [other] * RETRIEVALS,
    }
    found = [
        name
        for name, records in told.items()
        if amid_retrievals(Done("", "", 0.0, retrievals=records))
    ]

    assert found == ["amid"]
    assert REPLACED < RETRIEVALS
