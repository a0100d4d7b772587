"""Identity of a process: machine, boot, PID namespace, PID and start, and whether that process has ended.

On the same machine a dead process is recognised before its heartbeat lapses.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_DEAD = {"Z", "X"}  # a zombie has ended; its parent has not waited for it yet


def here() -> str:
    """Return this process' place: machine, boot, PID namespace, PID, start; "" if the system does not tell them."""
    began = _began(os.getpid())
    return f"{_machine()} {os.getpid()} {began}" if _machine() and began else ""


def is_gone(place: str) -> bool:
    """Return whether the process at `place` has certainly ended; False if this process cannot see that."""
    machine, _, process = place.rpartition(" ")[0].rpartition(" ")
    if not machine or machine != _machine():
        return False
    return _began(int(process)) != place.rpartition(" ")[2]


@cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _began(process: int) -> str:
    """Return the start of a process, in ticks since the boot; "" if there is no such process."""
    try:
        told = (_PROC / str(process) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = told.rpartition(")")[2].split()  # the name before it, in brackets, may hold spaces
    return "" if fields[0] in _DEAD else fields[19]
