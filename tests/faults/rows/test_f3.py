"""A hung worker of each kind: the others' requests go on, its own are done by somebody else, or once it goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.document import BenchOptions
from bench.partial import PartialResults
from bench.suites.f3 import describe
from chaos import f3

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"


@pytest.mark.timeout(0 if SOAK else 240)
async def test_hung_worker_holds_nothing_up(tmp_path: Path, seed: int) -> None:
    """Every request is answered although a worker is stopped; what it had taken is reclaimed in time."""
    print(f"seed {seed}")
    rounds = 10 if SOAK else 1
    partial = PartialResults(BenchOptions(partial=tmp_path / "F3.partial"), f3.Rounds)
    found = await f3.run(rounds, 6.5, tmp_path / "mesh", partial, seed, calm_s=1.0)

    assert {each.victim for each in found} == {victim.name for victim in f3.VICTIMS}
    for each in found:
        assert each.calm.failed == each.hung.failed == {}
        others = sum(map(len, each.hung.others_s.values()))
        assert others > 0
        taken = [value for values in each.hung.taken_s.values() for value in values]
        assert max(taken, default=0.0) < f3.ENDED_S + each.seconds + 3.0
    body = describe(found)
    assert len(body.tables[1]["rows"]) == len(f3.VICTIMS)
    # What the file holds is not done again.
    again = PartialResults(BenchOptions(partial=tmp_path / "F3.partial"), f3.Rounds)
    assert again.kept.rounds == found
