"""T1: what a token took between two readings, and threads as the kernel counts them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bench.mesh.threads import ThreadTimes, read_threads, summed
from bench.suites.t1 import CLIENT, WORKER, Snapshot, parts_of


def _task(root: Path, pid: int, tid: int, schedstat: str, switches: int) -> None:
    folder = root / str(pid) / "task" / str(tid)
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text(schedstat)
    (folder / "status").write_text(f"Name:\tx\nvoluntary_ctxt_switches:\t{switches}\n")


def test_threads_are_read_by_their_id(tmp_path: Path) -> None:
    """CPU and run queue come in nanoseconds and are microseconds here; a process that is gone has no threads."""
    _task(tmp_path, 7, 7, "5000 2000 9\n", 3)
    _task(tmp_path, 7, 8, "1000000 0 1\n", 0)

    assert read_threads(7, tmp_path) == {7: ThreadTimes(5, 2, 3), 8: ThreadTimes(1000, 0, 0)}
    assert read_threads(9, tmp_path) == {}


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel counts no schedstat"
)
def test_this_process_has_threads() -> None:
    """The kernel's own files are read: this thread has used a core."""
    found = read_threads(os.getpid())

    assert found[threading.get_native_id()].cpu_us > 0
    assert summed(list(found.values())).cpu_us >= found[threading.get_native_id()].cpu_us
    assert summed([]) == ThreadTimes(0, 0, 0)


def test_a_token_is_taken_apart() -> None:
    """Wall time is that between two tokens of a stream; threads' time is that of one token of any stream."""
    early = {WORKER: {7: ThreadTimes(500, 10, 10)}, CLIENT: {1: ThreadTimes(0, 0, 0)}}
    late = {
        WORKER: {
            7: ThreadTimes(1000, 10, 20),
            8: ThreadTimes(9000, 0, 4),
            9: ThreadTimes(8000, 0, 2),
            10: ThreadTimes(50, 0, 1),
        },
        CLIENT: {1: ThreadTimes(400, 0, 0)},
    }
    before = Snapshot(1.0, 100, 5.0, 0.5, early)
    after = Snapshot(3.0, 300, 6.8, 0.6, late)

    found = parts_of(before, after, 7, 2)

    assert found.token_us == pytest.approx(2e6 / 100)
    assert found.step_us == pytest.approx(1.8e4)
    assert found.between_us == pytest.approx(1e3)
    assert found.whole == pytest.approx(0.95)
    assert found.threads["worker's event loop"] == ThreadTimes(2.5, 0, 0.05)
    assert found.threads["compute thread 1"] == ThreadTimes(45, 0, 0.02)
    assert found.threads["compute thread 2"] == ThreadTimes(40, 0, 0.01)
    assert found.threads["worker's other threads"] == ThreadTimes(0.25, 0, 0.005)
    assert found.threads[CLIENT] == ThreadTimes(2, 0, 0)
