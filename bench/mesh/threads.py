"""Threads of processes as the kernel counts them: CPU time, time in the run queue, switches they asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_SWITCHES = "voluntary_ctxt_switches:"


class ThreadTimes(NamedTuple):
    """One thread's totals: microseconds on a core and waiting for one, and times it went to sleep by itself."""

    cpu_us: float
    queued_us: float
    switches: float

    def since(self, before: ThreadTimes) -> ThreadTimes:
        """Return what came since an earlier reading."""
        pairs = zip(self, before, strict=True)
        return ThreadTimes(*(later - earlier for later, earlier in pairs))


def read_threads(pid: int, root: Path = _PROC) -> dict[int, ThreadTimes]:
    """Return the totals of every living thread of a process by its id; empty if the process is gone.

    The kernel must have `schedstat` (FileNotFoundError if it has not).
    """
    found = dict[int, ThreadTimes]()
    tasks = root / str(pid) / "task"
    if not tasks.is_dir():
        return found
    for task in tasks.iterdir():
        with contextlib.suppress(ProcessLookupError):
            cpu_ns, queued_ns, _ = map(int, (task / "schedstat").read_text().split())
            lines = (task / "status").read_text().splitlines()
            switches = next(int(line.split()[1]) for line in lines if line.startswith(_SWITCHES))
            found[int(task.name)] = ThreadTimes(cpu_ns / 1e3, queued_ns / 1e3, switches)
    return found


def summed(threads: list[ThreadTimes]) -> ThreadTimes:
    """Return the sum of threads."""
    return ThreadTimes(*map(sum, zip(*threads, strict=True))) if threads else ThreadTimes(0, 0, 0)
