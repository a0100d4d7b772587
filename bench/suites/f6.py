"""F6: the fuzzed API and hostile inputs; the tests that do it, run and counted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from bench import ROOT
from bench.document import BenchOptions, Body

TESTS = (
    "tests/integration/router/test_openapi.py",
    "tests/integration/router/test_hostile.py",
    "tests/hostile",
)


def run(options: BenchOptions) -> Body:
    """Run the fuzzing tests with the counts of `make soak` (quick: those of `make test`)."""
    body, rows, failed = Body(), [], 0
    for path in TESTS:
        if not (ROOT / path).exists():
            continue
        row, wrong = _pytest(path, options)
        rows.append(row)
        failed += wrong
    body.table("", ["tests", "passed", "failed", "skipped", "seconds"], rows)
    body.samples["rows"] = rows
    body.met["0 responses of 5xx, hangs, crashes"] = "missed" if failed or not rows else "goal"
    body.notes.append(
        "Schemathesis on docs/openapi.yaml against the running server; every route and every kind."
    )
    return body


def _pytest(path: str, options: BenchOptions) -> tuple[list[str], int]:
    profile = "test" if options.quick else "soak"
    env = {**os.environ, "SPILLWAY_PROFILE": profile, "SPILLWAY_SEED": str(options.seed)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", path, f"--junitxml={report}", "--timeout=0"]
        subprocess.run(words, cwd=ROOT, env=env, check=False, timeout=4 * 3600)
        suite = ET.parse(report).getroot().find("testsuite")  # noqa: S314 - our own file
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = counts["failures"] + counts["errors"]
    passed = counts["tests"] - wrong - counts["skipped"]
    cells = [str(value) for value in (passed, wrong, counts["skipped"])]
    return [Path(path).stem.removeprefix("test_"), *cells, f"{time.monotonic() - began:.0f}"], wrong
