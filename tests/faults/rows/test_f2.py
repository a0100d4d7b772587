"""Cancel and disconnect under load: nothing nobody waits for goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos import f2
from chaos.work import Embeddings

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"
# On a busy machine it may take a second until all are admitted; none may have ended by then.
WORK = f2.EMBEDDINGS if SOAK else Embeddings(step_s=2.0, texts=16)


@pytest.mark.timeout(0 if SOAK else 60)
async def test_stopped_work_ends(tmp_path: Path) -> None:
    """Every job of a cancelled or abandoned request ends at once, whether it ran or waited."""
    for stop in await f2.run(20 if SOAK else 1, tmp_path, WORK):
        assert stop.left == 0
        assert len(stop.over_s) > f2.IN_FLIGHT // 2
        # A step that ended while the stop was on its way has given its results.
        assert set(stop.ends) <= {"cancelled", "result"}
        assert stop.ends["cancelled"] > f2.IN_FLIGHT // 2
