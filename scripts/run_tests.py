"""`make test`: run the tiers one after the other, then run each failed test once more, alone.

A tier is a folder of tests and a number of processes. A test that fails in its tier runs once more in a fresh process
with nothing beside it. If it passes there it is listed ("failed once, passed alone") and noted in
.tests/failed_once.jsonl; if it fails there, the run has failed. The last line sums up all tiers as pytest would.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTES = Path(".tests") / "failed_once.jsonl"
MOST_ALONE = 20  # more failures than these are not the machine's doing
LISTED_TOO_OFTEN = 3
# A file's tests run in one process. Files with few tests, which may be long ones, would come last if sorted by number.
BY_FILES = ("--dist", "loadfile", "--no-loadscope-reorder")
NO_TEST = 5  # pytest's status when nothing was selected
FAILED = 1  # pytest's status when tests failed
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?)")
CLOSING = re.compile(r"^=+ .*(passed|failed|error|skipped|deselected|no tests).* =+$")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
COULD_HAVE_RUN = "skipped, but could have run: "


@dataclass(frozen=True, slots=True)
class Tier:
    """Folders whose tests run together, and in how many processes (0: in pytest's own)."""

    name: str
    folders: tuple[str, ...]
    processes: int


@dataclass(slots=True)
class Outcome:
    """What one run of pytest said: its status, its counts by word, and the ids of the tests that failed."""

    status: int
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    unclosed: bool = False  # pytest ended without its closing line
    could_have_run: int = 0

    @property
    def explained(self) -> bool:
        """Tell whether the tests that failed are all there is against this run."""
        if self.unclosed or self.could_have_run:
            return False
        return self.status in {0, NO_TEST} or (self.status == FAILED and bool(self.failed))


def tiers(jobs: int) -> list[Tier]:
    """Return the tiers, the quickest first. Tests of faults need the machine, so fewer of them run at once."""
    return [
        Tier("unit", ("tests/unit",), jobs),
        Tier("guards", ("tests/guards",), min(jobs, 2)),
        Tier("integration", ("tests/integration", "client/tests"), jobs),
        Tier("faults", ("tests/faults",), min(jobs, 2)),
    ]


def pytest(words: list[str], root: Path) -> Outcome:
    """Run pytest, show what it prints, and return what it said."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spillway-tests-") as cache:
        words = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *words]
        process = subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert process.stdout is not None
        closing, could_have_run = "", 0
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            plain = COLOURS.sub("", line).strip()
            closing = plain if CLOSING.match(plain) else closing
            could_have_run += plain.startswith(COULD_HAVE_RUN)
        status = process.wait()
        known = Path(cache) / "v" / "cache" / "lastfailed"
        failed = sorted(json.loads(known.read_text(encoding="utf-8"))) if known.is_file() else []
    made = Outcome(status, time.monotonic() - began, failed=failed, unclosed=not closing)
    made.could_have_run = could_have_run
    for number, word in COUNT.findall(closing):
        made.counts["failed" if word.startswith("error") else word] += int(number)
    return made


def alone(tests: list[str], words: list[str], root: Path) -> list[str]:
    """Run each test once more in a process of its own; return those that passed."""
    passed = []
    for test in tests:
        print(f"\nonce more, alone: {test}", flush=True)
        again = pytest([test, *words], root)
        if again.status == 0 and again.explained and again.counts["passed"]:
            passed.append(test)
    return passed


def note(tests: list[str], root: Path) -> Counter[str]:
    """Add the tests that passed alone to the notes of this checkout; return how often each is in them."""
    path = root / NOTES
    path.parent.mkdir(exist_ok=True)
    seed = os.environ["SPILLWAY_SEED"]
    with path.open("a", encoding="utf-8") as notes:
        for test in tests:
            notes.write(json.dumps({"test": test, "at": int(time.time()), "seed": seed}) + "\n")
    lines = path.read_text(encoding="utf-8").splitlines()
    return Counter(json.loads(line)["test"] for line in lines)


def closing_line(counts: Counter[str], seconds: float) -> str:
    """Return the sum of all runs in the form of pytest's closing line."""
    words = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error", "errors")
    said = ", ".join(f"{counts[word]} {word}" for word in words if counts[word])
    return f" {said or 'no tests ran'} in {seconds:.2f}s ".center(80, "=")


def named(word: str, root: Path) -> bool:
    """Tell whether a word of the command line is a path of tests."""
    return word.startswith(("tests", "client/")) and (root / word.partition("::")[0]).exists()


def chosen(words: list[str], jobs: int, root: Path) -> list[Tier]:
    """Return the tiers to run: all, or one of the paths that the command line names."""
    paths = tuple(word for word in words if named(word, root))
    if paths:
        return [Tier("chosen", paths, jobs)]
    return [
        Tier(tier.name, folders, tier.processes)
        for tier in tiers(jobs)
        if (folders := tuple(folder for folder in tier.folders if (root / folder).is_dir()))
    ]


def run(words: list[str], jobs: int, root: Path) -> int:
    """Run the chosen tiers; return the status for `make`."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    sound = True
    options = [word for word in words if not named(word, root)]
    for tier in chosen(words, jobs, root):
        print(f"\ntier {tier.name} (SPILLWAY_SEED={os.environ['SPILLWAY_SEED']})", flush=True)
        processes = ["-n", str(tier.processes), *BY_FILES] if tier.processes else []
        done = pytest([*tier.folders, *options, *processes], root)
        counts += done.counts
        failures += done.failed
        sound = sound and done.explained
        print(f"tier {tier.name}: {done.seconds:.0f} s, status {done.status}", flush=True)
    saved: list[str] = []
    if failures and len(failures) <= MOST_ALONE:
        saved = alone(failures, options, root)
    elif failures:
        print(f"{len(failures)} tests failed: too many to run alone")
    if saved:
        often = note(saved, root)
        print(f"\nfailed once, passed alone: {', '.join(saved)}")
        listed = [test for test in saved if often[test] >= LISTED_TOO_OFTEN]
        if listed:
            print(f"listed {LISTED_TOO_OFTEN} times or more, which is a bug: {', '.join(listed)}")
    again = len(failures) - len(saved)
    counts["passed"] += len(saved)
    counts["failed"] = (
        again  # by their ids: pytest counts a failure and an error of its teardown as two
    )
    good = sound and not again and counts["passed"] > 0
    if not good and not again:
        counts["error"] = 1
    print(closing_line(counts, time.monotonic() - began), flush=True)
    return 0 if good else 1


def main() -> int:
    """Run what the command line names; SPILLWAY_SEED and JOBS come from the environment."""
    os.environ.setdefault("SPILLWAY_SEED", str(random.SystemRandom().randint(1, 2**31)))
    # The tests start hundreds of processes, which would compile the same files each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return run(sys.argv[1:], int(os.environ.get("JOBS", "3")), ROOT)


if __name__ == "__main__":
    sys.exit(main())
