"""F6: the fuzzed API and hostile inputs; the tests that do it, run and counted, and which route each attacked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

from bench import ROOT
from bench.document import BenchOptions, Body

DOCUMENT = ROOT / "docs" / "openapi.yaml"
METHODS = ("get", "post", "put", "patch", "delete")
FUZZ = "tests/integration/router/test_openapi.py"
TESTS = (
    FUZZ,
    "tests/integration/router/test_hostile.py",
    "tests/integration/hostile",
    "tests/unit/hostile",
    "tests/faults/hostile",
)
_OPERATION = re.compile(r"\[((?:GET|POST|PUT|PATCH|DELETE) /[^\]]*)\]$")


class TestCounts(NamedTuple):
    """What one file or folder of tests did; `routes` are tests that passed, by the operation they attacked.

    `fuzzed` is what schemathesis says: operations tested, and requests that it made.
    """

    name: str
    passed: int
    wrong: int
    skipped: int
    seconds: float
    routes: Counter[str]
    fuzzed: dict[str, int]


def run(options: BenchOptions) -> Body:
    """Run the fuzzing tests with the counts of `make soak` (quick: those of `make test`)."""
    return describe([_pytest(path, options) for path in TESTS])


def describe(found: list[TestCounts]) -> Body:
    """Turn what tests did into tables and verdicts; every operation of the document must have been attacked."""
    body = Body()
    rows = [
        [each.name, str(each.passed), str(each.wrong), str(each.skipped), f"{each.seconds:.0f}"]
        for each in found
    ]
    body.table("", ["tests", "passed", "failed", "skipped", "seconds"], rows)
    body.samples["rows"] = rows
    hostile: Counter[str] = sum((each.routes for each in found), Counter())
    operations = documented()
    attacked = [[name, str(hostile[name])] for name in operations]
    body.table("Hostile tests that passed, by route", ["route", "tests"], attacked)
    fuzzed = {name: count for each in found for name, count in each.fuzzed.items()}
    body.samples["routes"], body.samples["fuzzed"] = dict(hostile), fuzzed
    wrong = sum(each.wrong for each in found)
    body.met["0 responses of 5xx, hangs, crashes"] = "missed" if wrong else "goal"
    tested = fuzzed.get("operations", "unknown")
    whole = all(hostile[name] for name in operations) and tested == len(operations)
    body.met["every route of the document"] = "goal" if whole else "missed"
    body.notes.append(
        f"Schemathesis on docs/openapi.yaml against the running server: {tested} of {len(operations)} operations, "
        f"{fuzzed.get('requests', 0):,} requests. The dashboard's pages and every process' health port are "
        "attacked beside them."
    )
    return body


def documented() -> list[str]:
    """Return every operation of docs/openapi.yaml, as `POST /v1/embeddings`."""
    paths = yaml.safe_load(DOCUMENT.read_text(encoding="utf-8"))["paths"]
    return [f"{m.upper()} {path}" for path, item in paths.items() for m in METHODS if m in item]


def _pytest(path: str, options: BenchOptions) -> TestCounts:
    profile = "test" if options.quick else "soak"
    env = {**os.environ, "SPILLWAY_PROFILE": profile, "SPILLWAY_SEED": str(options.seed)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", path, f"--junitxml={report}", "--timeout=0"]
        words += ["-o", "junit_family=xunit1"]  # the one that takes properties of single tests
        subprocess.run(words, cwd=ROOT, env=env, check=False, timeout=4 * 3600)
        suite = ET.parse(report).getroot().find("testsuite")  # noqa: S314 - our own file
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = counts["failures"] + counts["errors"]
    # A path without a test is one that has moved: the row would lose its attacks unnoticed.
    wrong += not counts["tests"]
    passed = max(0, counts["tests"] - wrong - counts["skipped"])
    routes = Counter(
        match[1]
        for case in suite.iter("testcase")
        if (match := _OPERATION.search(case.get("name", ""))) and not len(case.findall("*"))
    )
    fuzzed = {
        each.get("name", "").removeprefix("fuzzed "): int(each.get("value", 0))
        for each in suite.iter("property")
        if each.get("name", "").startswith("fuzzed ")
    }
    name = path.removeprefix("tests/").removesuffix(".py").replace("/test_", "/")
    return TestCounts(
        name, passed, wrong, counts["skipped"], time.monotonic() - began, routes, fuzzed
    )
