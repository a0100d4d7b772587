"""`spillway bench --all`: every row in a process of its own, unattended, with what stands, failed or is left kept.

A row whose rivals are not installed is not begun, since a row without them cannot be published. With `--resume` a row
whose code has not changed since it was measured is left as it is, and one that was interrupted goes on where it was, or
begins anew if its code has changed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench import ROOT, document, hot_path, report, suite
from bench.document import RESULTS, BenchOptions
from bench.rivals import environments

FRESH, STALE, ABSENT, PARTLY = "fresh", "stale", "not measured", "not complete"
DONE, FAILED, LEFT, NO_RIVAL = "measured", "failed", "left", "rivals not installed"
LAST = ("H1",)  # the row that takes longest, up to twelve hours
LIMIT_S = 14 * 3600.0  # a row that takes longer than this has hung
TAIL = 300  # characters of a failed row's log that are shown

Run = Callable[[Sequence[str], Path, float], int]


class RowState(msgspec.Struct):
    """How the last run of a row ended."""

    ended: str
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where results and partial results lie, and whether rows that stand are left as they are."""

    results: Path
    place: Path
    resume: bool
    quick: bool = False
    minutes: float | None = None

    def partial(self, row: str) -> Path:
        """Return where a row keeps what is done."""
        return self.place / f"{row}.partial"

    def log(self, row: str) -> Path:
        """Return where a row's output goes."""
        return self.place / f"{row}.log"


def standing(found: Mapping[str, Any] | None, *, stale: bool) -> str:
    """Say how a row stands by its document: fresh, stale, not complete, or not measured."""
    if found is None:
        return ABSENT
    if stale:
        return STALE
    return PARTLY if found.get("left") or suite.missing(dict(found)) else FRESH


def standings(results: Path, rows: Iterable[str]) -> dict[str, str]:
    """Return how each row stands."""
    found = {}
    for row in rows:
        path = results / f"{row}.json"
        each = report.read(path) if path.exists() else None
        found[row] = standing(each, stale=each is not None and hot_path.stale(each))
    return found


def to_run(stands: Mapping[str, str], *, resume: bool) -> list[str]:
    """Return the rows to run, in order, the longest last; on resuming not those that are fresh."""
    rows = [row for row, stand in stands.items() if not (resume and stand == FRESH)]
    return sorted(rows, key=LAST.__contains__)


def run(plan: Plan, rows: Sequence[str] = (), execute: Run | None = None) -> int:
    """Run the rows (all by default) and say how they stand: 0 all are fresh, 1 one failed, 2 changes, 3 or 4 not all.

    3 if rivals are not installed, 4 if something is left for the same command with `--resume`.
    """
    publishes = plan.results.resolve() == RESULTS
    if publishes and (plan.quick or document.origin().dirty):
        why = "a quick run is not published" if plan.quick else "the code has uncommitted changes"
        print(f"{plan.results}: {why}; expected another place by --json", file=sys.stderr)
        return 2
    plan.place.mkdir(parents=True, exist_ok=True)
    plan.results.mkdir(parents=True, exist_ok=True)
    known, began = _read(plan), time.monotonic()
    stands = standings(plan.results, rows or suite.SUITES)
    for row in to_run(stands, resume=plan.resume):
        left_s = 60 * (plan.minutes or 1e6) - (time.monotonic() - began)
        known[row] = _run_row(plan, row, left_s, execute or _execute)
        _keep(plan, known)
        print(f"{row:<4} {_said(known[row])}", flush=True)
    if publishes:
        report.main([])
    after = standings(plan.results, rows or suite.SUITES)
    tell(after, known)
    ends = [known[row].ended for row, stand in after.items() if stand != FRESH and row in known]
    if FAILED in ends:
        return 1
    if NO_RIVAL in ends:
        return suite.NOT_MEASURED
    return suite.LEFT if any(stand != FRESH for stand in after.values()) else 0


def tell(stands: Mapping[str, str], known: Mapping[str, RowState]) -> None:
    """Print how each row stands, and how its last run ended."""
    for row, stand in stands.items():
        more = f"; last run: {_said(known[row])}" if row in known and stand != FRESH else ""
        print(f"{row:<4} {stand}{more}")
    fresh = sum(stand == FRESH for stand in stands.values())
    print(f"{fresh} of {len(stands)} rows are fresh")


def listed(plan: Plan) -> int:
    """Print how every row stands without running any."""
    tell(standings(plan.results, suite.SUITES), _read(plan))
    return 0


def _run_row(plan: Plan, row: str, left_s: float, execute: Run) -> RowState:
    if not plan.resume:
        plan.partial(row).unlink(missing_ok=True)
    folder = BenchOptions().setup_dir
    absent = [
        name for name in environments.ROWS.get(row, ()) if not environments.python(name, folder)
    ]
    if absent and not plan.quick:
        return RowState(NO_RIVAL, why=f"{', '.join(absent)} (spillway bench {row} --setup)")
    if left_s <= 0:
        return RowState(LEFT, why="the time was over")
    words = [row, "--json", str(plan.results / f"{row}.json"), "--partial", str(plan.partial(row))]
    words += ["--quick"] if plan.quick else []
    words += ["--minutes", f"{left_s / 60:.1f}"] if plan.minutes else []
    began = time.monotonic()
    # Kept first, for a run that is killed.
    _keep(plan, {**_read(plan), row: RowState(LEFT, why="it was interrupted")})
    status = execute(words, plan.log(row), LIMIT_S)
    ended = {0: DONE, suite.LEFT: LEFT, suite.NOT_MEASURED: NO_RIVAL}.get(status, FAILED)
    why = _tail(plan.log(row)) if ended == FAILED else ""
    return RowState(ended, time.monotonic() - began, why)


def _execute(words: Sequence[str], log: Path, limit_s: float) -> int:
    """Run one row; its output goes into the log. 124 if it had to be ended."""
    argv = [sys.executable, "-m", "bench.cli", *words]
    with log.open("wb") as file:
        try:
            return subprocess.run(
                argv, cwd=ROOT, stdout=file, stderr=file, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return " ".join(text[-TAIL:].split())


def _said(state: RowState) -> str:
    more = f": {state.why}" if state.why else ""
    return f"{state.ended} in {state.seconds / 60:.1f} min{more}"


def _read(plan: Plan) -> dict[str, RowState]:
    path = plan.place / "state.json"
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, RowState])


def _keep(plan: Plan, known: Mapping[str, RowState]) -> None:
    fresh = plan.place / "state.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
    fresh.replace(plan.place / "state.json")
