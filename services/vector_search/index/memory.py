"""The memory that a new structure may take: what the cgroup or the machine grants, less what the process holds."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from common.devices import detect

_STATM = Path("/proc/self/statm")


@cache
def _limit_bytes() -> int:
    machine = detect()
    limits = [each for each in (machine.memory_limit_bytes, machine.memory_bytes) if each]
    return min(limits, default=0)


def room_bytes() -> int | None:
    """Return the bytes that this process may still take, None where the kernel does not tell."""
    limit = _limit_bytes()
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return limit - pages * os.sysconf("SC_PAGE_SIZE") if limit else None
