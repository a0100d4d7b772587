"""Identity of a process: machine, boot, PID namespace, PID and start, and whether that process has ended.

On its own machine a dead process is recognised without waiting for its heartbeat to lapse.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_DEAD = {"Z", "X"}  # a zombie does nothing any more, its parent has only not looked yet


def here() -> str:
    """Return this process' place: machine, boot, PID namespace, PID, start. Empty where the system does not tell."""
    began = _began(os.getpid())
    return f"{_machine()} {os.getpid()} {began}" if _machine() and began else ""


def is_gone(place: str) -> bool:
    """Return whether the process at `place` has certainly ended; False wherever that cannot be seen from here."""
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
    """Return when a process began, in ticks since the boot; empty if there is none."""
    try:
        told = (_PROC / str(process) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = told.rpartition(")")[2].split()  # its name, in brackets, may hold anything
    return "" if fields[0] in _DEAD else fields[19]
