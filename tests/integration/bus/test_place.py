"""Whether a process is gone from its place: only what is certain counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from common import process_identity

SAY = "import sys; from common import process_identity; print(process_identity.here(), flush=True); sys.stdin.read()"


def test_a_process_is_gone_once_it_was_killed() -> None:
    """Stopped it is there; killed it is gone, whether or not its parent has looked."""
    words = [sys.executable, "-c", SAY]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        where = one.stdout.readline().strip()
        assert str(one.pid) in where.split(" ")
        assert not process_identity.is_gone(where)
        one.send_signal(signal.SIGSTOP)
        assert not process_identity.is_gone(where)
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
        assert process_identity.is_gone(where)
    assert process_identity.is_gone(where)


def test_what_cannot_be_seen_is_not_gone() -> None:
    """Another machine, boot or namespace, and words that are no place, say nothing."""
    machine, process, began = process_identity.here().split(" ")
    assert not process_identity.is_gone(process_identity.here())
    assert process_identity.is_gone(
        f"{machine} {process} {int(began) - 1}"
    )  # the number was given again
    for other in ("", "?", "a b", f"other{machine} {process} 1", f"{machine}1 999999999 1"):
        assert not process_identity.is_gone(other)


@pytest.mark.parametrize("name", ["a) S 1 (b", "x y"])
def test_a_process_may_be_called_anything(name: str) -> None:
    """Its name stands in the line that is read, and does not confuse it."""
    code = f"open('/proc/self/comm', 'w').write({name!r}); {SAY}"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        where = one.stdout.readline().strip()
        assert where.split(" ")[1] == str(one.pid)
        assert not process_identity.is_gone(where)
        one.kill()
