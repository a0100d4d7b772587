"""`make test`: tiers, the second run of a failed test, and the closing line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CLOSING = re.compile(r"^=+ (.*) in [\d.]+s =+$", re.M)
PASSES = "def test_good():\n    pass\n"
FAILS = "def test_bad():\n    assert 1 == 2\n"
ONCE = """
from pathlib import Path

def test_second_time_lucky():
    ran = Path(__file__).with_name("ran")
    before = ran.exists()
    ran.touch()
    assert before
"""
TEARDOWN = """
import pytest
from pathlib import Path

@pytest.fixture
def leaks():
    yield
    ran = Path(__file__).with_name("ran-too")
    before = ran.exists()
    ran.touch()
    assert before

def test_teardown(leaks):
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script, a passing test in one tier, and room for more."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "run_tests.py", tmp_path / "scripts")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for tier in ("unit", "integration"):
        (tmp_path / "tests" / tier).mkdir(parents=True)
        (tmp_path / "tests" / tier / "test_good.py").write_text(PASSES)
    return tmp_path


def run(checkout: Path, *words: str) -> tuple[int, str, str]:
    """Run the script; return its status, the last closing line's counts, and all it printed."""
    env = {**os.environ, "JOBS": "0", "SPILLWAY_SEED": "7", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "scripts/run_tests.py", *words],
        cwd=checkout, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, CLOSING.findall(done.stdout)[-1], done.stdout


def test_tiers_are_summed_up(checkout: Path) -> None:
    """All tiers run with one seed; the last line has the sum of their counts."""
    status, closing, said = run(checkout)

    assert (status, closing) == (0, "2 passed")
    assert said.count("(SPILLWAY_SEED=7)") == 2
    assert "failed once" not in said


def test_what_passes_alone_is_listed(checkout: Path) -> None:
    """A test that passes the second time does not fail the run; at its third time the list calls it a bug."""
    (checkout / "tests/unit/test_once.py").write_text(ONCE)
    (checkout / "tests/unit/test_leak.py").write_text(TEARDOWN)
    names = (
        "tests/unit/test_leak.py::test_teardown, tests/unit/test_once.py::test_second_time_lucky"
    )

    status, closing, said = run(checkout)

    assert status == 0
    assert "failed" not in closing
    assert f"failed once, passed alone: {names}\n" in said
    assert "bug" not in said
    for _ in range(2):
        for mark in ("ran", "ran-too"):
            (checkout / "tests/unit" / mark).unlink()
        status, _, said = run(checkout)
        assert status == 0
    assert f"listed 3 times or more, which is a bug: {names}\n" in said
    assert run(checkout)[2].count("failed once") == 0


def test_what_fails_twice_fails_the_run(checkout: Path) -> None:
    """A test that fails alone, too, is counted as failed; what passed elsewhere is counted as passed."""
    (checkout / "tests/unit/test_bad.py").write_text(FAILS)

    status, closing, said = run(checkout)

    assert (status, closing) == (1, "1 failed, 2 passed")
    assert "once more, alone: tests/unit/test_bad.py::test_bad" in said


def test_a_run_that_breaks_off_fails(checkout: Path) -> None:
    """A module that cannot be imported, or a pytest that is ended from outside, is no green run."""
    (checkout / "tests/unit/test_broken.py").write_text("import nothing_of_this_name\n")
    assert run(checkout)[0] == 1
    (checkout / "tests/unit/test_broken.py").write_text(
        "import os\n\ndef test_end():\n    os._exit(0)\n"
    )

    status, closing, _ = run(checkout)

    assert status == 1
    assert "error" in closing


def test_one_file_may_be_named(checkout: Path) -> None:
    """A path, a test of it, or a word that selects tests narrows the run; to select none is an error."""
    assert run(checkout, "tests/unit/test_good.py::test_good")[:2] == (0, "1 passed")
    assert run(checkout, "-k", "good")[:2] == (0, "2 passed")
    assert run(checkout, "-k", "absent")[0] == 1


def test_a_skip_that_could_have_run_fails_the_gate(checkout: Path) -> None:
    """The line that tests/conftest.py prints of such a test fails the run, though no test failed."""
    (checkout / "tests/unit/conftest.py").write_text(
        "def pytest_sessionfinish(session):\n"
        "    print('\\nskipped, but could have run: tests/unit/test_good.py')\n"
        "    session.exitstatus = 1\n"
    )

    assert run(checkout)[0] == 1
