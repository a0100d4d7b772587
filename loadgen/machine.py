"""The machine that a run was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VECTORS = ("avx", "amx", "fma", "f16c")


def machine() -> dict[str, Any]:
    """Return the CPU's name, family, model and vector instructions; this process' cores, memory and kernel."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": said.get("model name", ""),
        "family": said.get("cpu family", ""),
        "model": said.get("model", ""),
        "flags": [flag for flag in said.get("flags", "").split() if flag.startswith(_VECTORS)],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def described(about: Mapping[str, Any]) -> str:
    """Return a machine's cores in words, with its processor's name, and family and model where these are known."""
    kind = f" (family {about['family']}, model {about['model']})" if about.get("family") else ""
    return f"{about['cores']} cores of {about['cpu'].strip()}{kind}"


def processor() -> str:
    """Return the cores of this process and their processor, in words."""
    return described(machine())
