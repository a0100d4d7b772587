"""`spillway bench --all`: what is run, what is skipped, what is said, and how an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import all_rows, document, suite
from bench.all_rows import ABSENT, FRESH, PARTLY, STALE, Plan, standing, to_run
from bench.document import BenchOptions, Body, Origin, Rival
from bench.rivals import environments

HERE = Origin("c0ffee", dirty=False)
STANDS = (FRESH, STALE, ABSENT, PARTLY)


def _document(row: str = "V2", *, left: int = 0, measured: bool = True) -> dict[str, object]:
    body = Body(met={"all": "goal"}, left=left)
    body.rivals += [Rival(name, measured=measured) for name in suite.SUITES[row].rivals]
    return document.build(row, "Search", body, BenchOptions(), HERE)


def test_standing_of_a_row() -> None:
    """Not measured, of other code, with cells left, without its rival, or fresh."""
    assert standing(None, stale=False) == ABSENT
    assert standing(_document(), stale=True) == STALE
    assert standing(_document(left=2), stale=False) == PARTLY
    assert standing(_document("V1", measured=False), stale=False) == PARTLY
    assert standing(_document(), stale=False) == FRESH


@given(st.dictionaries(st.sampled_from(sorted(suite.SUITES)), st.sampled_from(STANDS)))
def test_only_what_is_not_fresh_runs_on_resuming(stands: dict[str, str]) -> None:
    """Without resuming every row runs; on resuming those that are not fresh; the longest comes last."""
    assert sorted(to_run(stands, resume=False)) == sorted(stands)
    rows = to_run(stands, resume=True)
    assert set(rows) == {row for row, stand in stands.items() if stand != FRESH}
    assert "H1" not in rows[:-1]


class _Rows:
    """Stands for the rows' processes: keeps the words, and writes the documents."""

    def __init__(self, statuses: dict[str, int]) -> None:
        self._statuses = statuses
        self.words: list[Sequence[str]] = []

    def __call__(self, words: Sequence[str], log: Path, limit_s: float) -> int:
        self.words.append(words)
        row, status = words[0], self._statuses.get(words[0], 0)
        log.write_text("the rival\nfell over", encoding="utf-8")
        if status in (0, suite.LEFT):
            found = _document(row, left=1 if status else 0)
            document.save(Path(words[words.index("--json") + 1]), found)
        return status


def _plan(folder: Path, **more: bool) -> Plan:
    return Plan(folder / "results", folder / "place", resume=True, **more)


def test_rows_are_run_once_and_then_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run finds every row fresh and begins none."""
    run = _Rows({})
    rows = ("V2", "F2")

    assert all_rows.run(_plan(tmp_path), rows, run) == 0
    assert [words[0] for words in run.words] == list(rows)
    assert all_rows.run(_plan(tmp_path), rows, run) == 0
    assert len(run.words) == 2
    assert "2 of 2 rows are fresh" in capsys.readouterr().out


def test_failure_stops_no_other_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that failed is said with the end of its log; one with cells left is 4; the next run takes both again."""
    run = _Rows({"V2": 1, "R2": suite.LEFT})
    rows = ("V2", "R2", "F2")

    assert all_rows.run(_plan(tmp_path), rows, run) == 1
    assert [words[0] for words in run.words] == list(rows)
    said = capsys.readouterr().out
    assert "V2   not measured; last run: failed" in said
    assert "the rival fell over" in said
    assert "R2   not complete; last run: left" in said
    assert all_rows.run(_plan(tmp_path), rows, _Rows({"R2": suite.LEFT})) == suite.LEFT


def test_partial_result_is_gone_on_with_only_on_resuming(tmp_path: Path) -> None:
    """What an interrupted row has done is dropped by a run from the beginning."""
    run = _Rows({"R2": suite.LEFT})
    resuming = _plan(tmp_path)
    all_rows.run(resuming, ("R2",), run)
    resuming.partial("R2").write_text("half")
    all_rows.run(resuming, ("R2",), run)
    assert resuming.partial("R2").exists()
    all_rows.run(replace(resuming, resume=False), ("R2",), run)
    assert not resuming.partial("R2").exists()


def test_row_without_its_rivals_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could not be published; the command that installs them is said."""
    monkeypatch.setattr(environments, "python", lambda name, folder: None)
    run = _Rows({})

    assert all_rows.run(_plan(tmp_path), ("H2",), run) == suite.NOT_MEASURED
    assert run.words == []
    assert "spillway bench H2 --setup" in capsys.readouterr().out


def test_what_is_published_comes_of_a_clean_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A tree with changes, or a quick run, begins nothing where published results lie."""
    monkeypatch.setattr(document, "origin", lambda: Origin("c0ffee", dirty=True))
    for quick in (False, True):
        plan = Plan(document.RESULTS, tmp_path, resume=True, quick=quick)
        assert all_rows.run(plan, ("V2",), _Rows({})) == 2
    assert "uncommitted changes" in capsys.readouterr().err
