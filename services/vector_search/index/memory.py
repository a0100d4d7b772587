"""The memory that a structure may take: what the cgroup or the machine grants, less what the process holds for good."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from common.devices import detect

_STATM = Path("/proc/self/statm")


@cache
def limit_bytes() -> int:
    """Return the bytes that this process may have, 0 where the kernel does not tell."""
    machine = detect()
    limits = [each for each in (machine.memory_limit_bytes, machine.memory_bytes) if each]
    return min(limits, default=0)


def room_bytes() -> int | None:
    """Return the bytes that this process may still take, None where the kernel does not tell.

    Pages of files are not counted: the kernel takes them back.
    """
    limit = limit_bytes()
    try:
        resident, shared = map(int, _STATM.read_text().split()[1:3])
    except (OSError, ValueError):
        return None
    pages = resident - shared
    return limit - pages * os.sysconf("SC_PAGE_SIZE") if limit else None
