"""The JSON of a check on an accelerator, written cell by cell, so that an interrupted run continues."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

AGAIN = 3  # exit status of a check whose minutes left cells for another run


class Record:
    """The JSON of one check: `cells` by name, with date and device; at most `minutes` are spent in one run."""

    def __init__(self, path: Path, device: str, minutes: float = float("inf")) -> None:
        self._path = path
        self._until = time.monotonic() + 60 * minutes
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": {}}
        name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
        if found.setdefault("device", name) != name:
            raise SystemExit(
                f"{path} was measured on {found['device']}, this is {name}; give another file"
            )
        self.found: dict[str, Any] = found | {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
        }
        self.left = 0

    @property
    def cells(self) -> dict[str, Any]:
        """Return what has been measured."""
        cells: dict[str, Any] = self.found["cells"]
        return cells

    def wants(self, *names: str) -> bool:
        """Tell whether a cell of these is still to be measured."""
        return any(name not in self.cells for name in names)

    def fill(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a cell and store it, unless it is there or the minutes are over (then it counts as left)."""
        if not self.wants(name):
            return
        if time.monotonic() > self._until:
            self.left += 1
            return
        began = time.monotonic()
        self.cells[name] = measure() | {"took_s": round(time.monotonic() - began, 1)}
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        fresh.replace(self._path)

    def status(self) -> int:
        """Return a check's exit status: AGAIN, and say so, if cells are left; 1 if one is not exact; else 0."""
        if self.left:
            print(f"{self.left} cells are left: run the same command again", file=sys.stderr)
            return AGAIN
        return 0 if all(cell.get("met", True) for cell in self.cells.values()) else 1


def arguments(
    about: str | None, words: Sequence[str] | None, *, models: str = ""
) -> argparse.Namespace:
    """Read a check's command line; with `models`, how much it takes, random weights can be kept.

    Where a CUDA device is asked for and torch sees none, it ends with a sentence that names the rehearsal.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: one tiny shape")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no cell after these")
    if models:
        told = f"keep the random weights here ({models}); default: a temporary one"
        parser.add_argument("--models", type=Path, help=told)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no CUDA device here; rehearse with --device cpu --tiny"
        )
    return args


def cpu_name() -> str:
    """Return the CPU's model."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
