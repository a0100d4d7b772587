"""What ends a test that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_AGAIN_S
from tests.support.mesh import ROOT


def test_a_timeout_that_is_lost_comes_again() -> None:
    """The alarm of this test is one that repeats."""
    assert signal.getitimer(signal.ITIMER_REAL)[1] == TIMEOUT_AGAIN_S


async def test_a_callback_of_the_loop_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it must: what is raised while a callback runs goes to the loop, and the test waits on."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(loop, "_exception_handler", lambda *_: lost.set())

    def is_late() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05, TIMEOUT_AGAIN_S)  # this test's own alarm, now
        time.sleep(5)

    loop.call_soon(is_late)
    await asyncio.wait_for(lost.wait(), 10)


CONFTEST = """
import faulthandler
calls = []
faulthandler.dump_traceback_later = lambda *_, **__: calls.append("begun")
faulthandler.cancel_dump_traceback_later = lambda: calls.append("ended")
from tests.conftest import pytest_exception_interact, pytest_runtest_protocol
"""
TESTS = """
from conftest import calls

def test_fails():
    assert False

def test_goes_on():
    assert calls[-2:] == ["begun", "ended"]
"""


def test_the_limit_of_a_teardown_ends_with_its_test(tmp_path: Path) -> None:
    """In the gate the teardown of a failed test has a limit; the tests after it are not ended by that."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    env = {**os.environ, "CI": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )

    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
