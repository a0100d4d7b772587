"""V1 in process: a real library in a process of its own, and a whole small run beside our index."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.document import BenchOptions
from bench.partial import PartialResults
from bench.rivals.engine_process import EngineError, EngineProcess
from bench.rivals.search_servers import kept
from bench.rivals.vector_library import BUILDS, FAISS, HNSWLIB
from bench.suites import v1, v1_process, v1_process_tables
from bench.suites.v1_process import SCRIPT, WAYS
from bench.suites.v1_servers import OURS
from bench.workloads import search_sets
from bench.workloads.search_sets import SetShape, search_set

SMALL = SetShape("clustered", 3000, 16, "clustered")


async def test_a_small_run_measures_what_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of asking have a cell with ours and the library that is there; who is not stands with the reason."""
    monkeypatch.setattr(search_sets, "QUICK", SMALL)
    options = BenchOptions(
        quick=True, count=2, setup_dir=tmp_path / "setup", partial=tmp_path / "V1.partial"
    )
    partly = PartialResults(options, v1.SearchKept)
    await v1_process.measure(partly, partly.kept.process, options)
    again = PartialResults(options, v1.SearchKept).kept

    assert set(again.process.cells) == {v1_process.cell_name(SMALL, way) for way in WAYS}
    for cell in again.process.cells.values():
        assert set(cell.sides) == {OURS, HNSWLIB}
        assert all(len(rates) == 2 and min(rates) > 0 for rates in cell.rounds.rates.values())
        assert min(side.recall for side in cell.sides.values()) > 0.9
    assert again.process.absent[FAISS] == "faiss is not set up"
    body = v1.describe(again)
    assert v1_process_tables.against(HNSWLIB) in body.met
    assert [rival.measured for rival in body.rivals[: len(BUILDS)]] == [True, False, False, False]


async def test_a_library_opens_the_build_of_its_setting(tmp_path: Path) -> None:
    """Indexes lie on disk; a setting opens its own, its effort decides the recall, and a wrong one ends with why."""
    options = BenchOptions(setup_dir=tmp_path)
    rows = search_set(SMALL, 1, tmp_path)
    folder = await v1_process.indexes(sys.executable, HNSWLIB, rows, options)
    assert folder == kept(rows, HNSWLIB, options)
    assert {path.name for path in folder.iterdir()} == set(BUILDS[HNSWLIB])

    argv = [sys.executable, "-P", SCRIPT, "serve", HNSWLIB, str(rows.folder), str(folder)]
    async with EngineProcess(argv) as process:
        found = {}
        for build in BUILDS[HNSWLIB]:
            for ef in (10, 200):
                await process.ask("use", setting={"build": build, "ef": ef, "threads": 1})
                found[build, ef] = (await process.answer("recall", start=0, count=500))["recall"]
        assert all(found[build, 10] < found[build, 200] for build in BUILDS[HNSWLIB])
        assert found["m32", 200] > 0.99
        assert await process.ask("search", start=500, count=300, per=256) > 0
        with pytest.raises(EngineError, match="m99"):
            await process.ask("use", setting={"build": "m99", "ef": 10, "threads": 1})
