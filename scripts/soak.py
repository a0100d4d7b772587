"""`make soak`: the long runs of tests, fault runs and benchmarks, in pieces of at most an hour that resume.

A piece is a test file whose counts the soak raises (`faults/bus/chaos`), or a row of the benchmarks (`bench/F1A`).
What has passed at this commit is not run again: a test file goes on with the tests that have not passed, a fault run
with the kills that are left. Results are in .soak/, as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".soak"
PIECE_S = 3600
CLOSE_S = 300  # of them, for what is under way to end
LONGER = re.compile(r"\bhypothesis\b|\bPROFILE\b|\bsampled\b|\bsoak\b")
HELPER = re.compile(r"^(?:from|import) (tests\.[\w.]+)", re.M)
# Rows of the benchmarks, and what the run gets besides its JSON. F6 is not among them: its tests are pieces themselves.
BENCH = {
    "E1": ("--count", "200"),  # pairs a row, of 300: that is what fits into an hour
    **dict.fromkeys(("L1", "L2", "L3", "L4", "L5", "L6", "K1", "N2", "P1", "P2", "X2"), ()),
    # A cell of H1 may take 20 minutes, a round of H2 30.
    **{
        row: ("--partial", str(PLACE / f"{row}.partial"), "--minutes", minutes)
        for row, minutes in {
            "H1": "30",
            "H2": "25",
            "N1": "30",
            "G1": "30",
            "P3": "30",
            "G2M": "30",
            "P4": "30",
            "P5": "30",
            "V3": "30",
            "F3": "30",
        }.items()
    },
    **{
        row: ("--cgroup", "/sys/fs/cgroup/memory", "--partial", str(PLACE / f"{row}.partial"))
        for row in ("V1M", "V6")
    },
    **dict.fromkeys(
        (
            "E2",
            "R1",
            "V1",
            "V1W",
            "V2",
            "V1L",
            "V4",
            "V4R",
            "G1P",
            "G1Q",
            "G2",
            "N1S",
            "G1S",
            "G3",
            "V5",
            "F5",
            "F5P",
            "C1",
            "R1C",
            "Q1",
            "Q2",
            "X1",
            "W1",
            "W2",
            "W3",
            "T1",
        ),
        (),
    ),
}
FAULTS = {
    "R2": ("r2",), "F1": ("f1",), "F1C": ("f1", "--chat"), "F1A": ("f1", "--all"), "F1P": ("f1", "--pages"),
    "F1R": ("f1", "--pipelined"),
    "F2": ("f2",), "F2C": ("f2", "--chat"), "F4": ("f4",), "F4C": ("f4", "--chat"),
}  # fmt: skip
FAULT_LEFT, BENCH_LEFT = 3, 4  # a fault run's status when kills are left, a row's when cells are
NO_TEST = 5  # pytest's, when nothing was selected


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece: a test file, or the words after `python -m` of a row's run."""

    name: str
    path: str = ""
    words: tuple[str, ...] = ()


def pieces() -> dict[str, Piece]:
    """Return every piece by name."""
    found = [Piece(name, path) for name, path in test_files().items()]
    for row, more in BENCH.items():
        found.append(Piece(f"bench/{row}", words=("bench.cli", row, *more)))
    for row, (module, *flags) in FAULTS.items():
        minutes = str(
            (PIECE_S - 3 * CLOSE_S) // 60
        )  # a mesh must start, and be looked over at the end
        limit = ("--minutes", minutes) if module == "f1" else ()
        found.append(Piece(f"bench/{row}", words=(f"chaos.{module}", *flags, *limit)))
    return {piece.name: piece for piece in found}


def test_files() -> dict[str, str]:
    """Return the test files that do more in the soak: `unit/pages/codec` is tests/unit/pages/test_codec.py."""
    found = {}
    for root in (ROOT / "tests", ROOT / "client" / "tests"):
        for path in sorted(root.rglob("test_*.py")):
            if not any(LONGER.search(text) for text in _read_with_helpers(path)):
                continue
            inner = path.relative_to(root).with_suffix("").as_posix()
            name = inner.removeprefix("test_") if "/" not in inner else inner.replace("/test_", "/")
            # What tests/faults/rows does at length are the rows of the benchmarks.
            if not name.startswith("faults/rows/"):
                prefix = "client/" if root.parent.name == "client" else ""
                found[f"{prefix}{name}"] = str(path.relative_to(ROOT))
    return found


def _read_with_helpers(path: Path) -> list[str]:
    """Return the text of a test file, of the conftest beside it and of the modules of the tests it names."""
    text = path.read_text(encoding="utf-8")
    names = {name.replace(".", "/") for name in HELPER.findall(text)} - {"tests/conftest"}
    helpers = [ROOT / f"{name}.py" for name in sorted(names)]
    beside = path.parent / "conftest.py"
    helpers += [beside] if beside.parent != ROOT / "tests" else []
    return [text, *(each.read_text(encoding="utf-8") for each in helpers if each.is_file())]


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout


def commit() -> str:
    """Return the checkout's commit; with changes that are not committed, also their hash."""
    name = _git("rev-parse", "--short=12", "HEAD").decode().strip() or "unknown"
    changes = _git("diff", "HEAD")
    return f"{name}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else name


def read_state() -> dict[str, Any]:
    """Return what earlier runs have noted, by piece."""
    try:
        state = json.loads((PLACE / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def keep(result: dict[str, Any]) -> None:
    """Write one piece's result into the state, whole or not at all."""
    state = {**read_state(), result["piece"]: result}
    fresh = PLACE / "state.new"
    fresh.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    fresh.replace(PLACE / "state.json")


def execute(words: list[str], seed: int) -> int:
    """Run a command for at most an hour; return its status, 124 if it had to be interrupted."""
    env = {**os.environ, "SPILLWAY_PROFILE": "soak", "SPILLWAY_SEED": str(seed)}
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env=env)
    try:
        return process.wait(PIECE_S - CLOSE_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        # A fault run has its own limit, which is this one: it is ending.
        if words[0] == "pytest":
            process.send_signal(signal.SIGINT)
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return 124 if words[0] == "pytest" or process.returncode < 0 else process.returncode


def run(piece: Piece, before: dict[str, Any], seed: int, extra: list[str]) -> dict[str, Any]:
    """Run one piece for at most an hour; return its result, with what earlier runs of it have."""
    began = time.monotonic()
    result = (
        {"piece": piece.name, "runs": 0, "seconds": 0.0, "passed": []} | before | {"seed": seed}
    )
    run_one = _tests if piece.path else _row
    run_one(piece, result, seed, extra)
    result["runs"] += 1
    result["seconds"] = round(result["seconds"] + time.monotonic() - began, 1)
    return result


def _tests(piece: Piece, result: dict[str, Any], seed: int, extra: list[str]) -> None:
    """Run the tests of a file that have not passed yet; `left` if the hour was over before all had run."""
    report = PLACE / f"{piece.name.replace('/', '-')}.xml"
    report.unlink(missing_ok=True)
    past = [word for name in result["passed"] for word in ("--deselect", f"{piece.path}::{name}")]
    form = ("-o", "junit_family=xunit1")  # the one that takes what tests count
    words = ["pytest", piece.path, f"--junitxml={report}", *form, "--timeout=0", *past, *extra]
    status = execute(words, seed)
    fresh, failed, counts = [], 0, Counter(result.get("counts", {}))
    if report.exists():
        for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest's own report
            wrong = case.find("failure") is not None or case.find("error") is not None
            failed += wrong
            if not wrong and case.find("skipped") is None:
                fresh.append(case.get("name"))
                counts.update(_counts(case))
    # Interrupted with tests passed: the rest is for the next hour. Without one there is no end in sight.
    left = status == 124 and bool(fresh) and not failed
    result["passed"] += fresh
    result |= {"status": 0 if status == NO_TEST else status, "left": left, "failed": failed}
    result |= {"counts": dict(counts)} if counts else {}


def _counts(case: ET.Element) -> dict[str, int]:
    """Return what a test that passed has counted (`record`), by name."""
    told = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
    return {name: int(value) for name, value in told.items() if value.isdecimal()}


def _row(piece: Piece, result: dict[str, Any], _seed: int, extra: list[str]) -> None:
    """Measure a row, or go on with it; a level that it missed is a failure."""
    path = PLACE / f"{piece.name.rpartition('/')[2]}.json"
    status = execute([*piece.words, "--json", str(path), *extra], 1)
    left = status == (FAULT_LEFT if piece.words[0].startswith("chaos.") else BENCH_LEFT)
    met = json.loads(path.read_text(encoding="utf-8"))["met"] if path.exists() else {}
    missed = [what for what, word in met.items() if word == "missed"]
    result |= {
        "status": status or int(bool(missed)),
        "left": left,
        "missed": missed,
        "json": path.name,
    }


def told(last: dict[str, Any], here: str) -> str:
    """Return how a piece stands, in words."""
    if not last:
        return "never run"
    ended = "goes on" if last["left"] else "passed" if last["status"] == 0 else "FAILED"
    missed = f", missed: {', '.join(last['missed'])}" if last.get("missed") else ""
    missed += "".join(f", {count:,} {what}" for what, count in last.get("counts", {}).items())
    old = "" if last["commit"] == here else f" at {last['commit']}"
    return f"{ended}{old}, {last['seconds'] / 60:.1f} min in {last['runs']} runs{missed}"


def total(known: dict[str, Piece], here: str) -> str:
    """Return how many pieces have passed at this commit, and how long all of it took."""
    at = [
        each for name, each in read_state().items() if name in known and each.get("commit") == here
    ]
    passed = sum(each["status"] == 0 and not each["left"] for each in at)
    minutes = sum(each["seconds"] for each in at) / 60
    return f"{passed} of {len(known)} pieces have passed at {here}; {minutes:.0f} minutes in all"


def main() -> int:
    """Run the pieces asked for, or all; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="pieces, or their directories; none: all")
    parser.add_argument("--list", action="store_true", help="show the pieces and how they stand")
    parser.add_argument("--again", action="store_true", help="also what has passed at this commit")
    args, extra = parser.parse_known_args()
    PLACE.mkdir(exist_ok=True)
    known, here = pieces(), commit()
    asked = [name.rstrip("/") for name in args.name]
    chosen = [n for n in known if not asked or any(n == a or n.startswith(f"{a}/") for a in asked)]
    if not chosen:
        sys.stderr.write(
            f"soak: no piece {' '.join(asked)!r}; `make soak ARGS=--list` shows them\n"
        )
        return 2
    if args.list:
        for name in chosen:
            print(f"{name:<36} {told(read_state().get(name, {}), here)}")
        print(total(known, here))
        return 0
    failed = [
        name for name in chosen if not _passes(known[name], here, again=args.again, extra=extra)
    ]
    print(f"soak: {total(known, here)}")
    if failed:
        print(f"soak: failed: {', '.join(failed)}")
    return int(bool(failed))


def _passes(piece: Piece, here: str, *, again: bool, extra: list[str]) -> bool:
    """Run a piece to its end, an hour at a time, unless it has passed at this commit."""
    last = read_state().get(piece.name, {})
    if again or last.get("commit") != here:
        last = {}
    if last.get("status") == 0 and not last["left"]:
        print(f"soak: {piece.name} {told(last, here)}")
        return True
    while True:
        seed = int(os.environ.get("SPILLWAY_SEED") or random.SystemRandom().randint(1, 2**31))
        print(f"soak: {piece.name} (SPILLWAY_SEED={seed})", flush=True)
        last = run(piece, last, seed, extra) | {"commit": here}
        keep(last)
        print(f"soak: {piece.name} {told(last, here)}", flush=True)
        if not last["left"]:
            return bool(last["status"] == 0)


if __name__ == "__main__":
    sys.exit(main())
