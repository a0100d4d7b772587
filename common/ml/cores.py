"""How many cores this process may use: affinity and cgroup quota, never the host's count."""

from __future__ import annotations

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
