"""Paths of this machine's compiled kernels: shipped with the package, kept in the cache, or built there now."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path

from common import log
from common.native import library
from common.native.library import KernelSource
from common.native.openmp import open_openmp

_log = log.get("ml")


def find(source: KernelSource, directory: Path | None = None) -> Path | None:
    """Return a source's library, building it if needed; None where it cannot be had or cannot run."""
    if not source.needs.issubset(library.cpu_flags().split()):
        return None
    brought = library.brought(source)
    if brought is not None:
        return brought
    for place in _places(directory):
        try:
            path = library.build(source, place)
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("kernels_not_built", directory=str(place), why=str(error))
            continue
        if path is not None:
            return path
    return None


def open_first(builds: Iterable[KernelSource], directory: Path | None = None) -> ctypes.CDLL | None:
    """Open the first build that this machine can have and run; None if there is none."""
    for source in builds:
        path = find(source, directory)
        opened = None if path is None else open_library(path)
        if opened is not None:
            return opened
    return None


def open_library(path: Path) -> ctypes.CDLL | None:
    """Open a library of kernels that shares torch's OpenMP; None, with a warning, if that fails."""
    try:
        open_openmp()
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("kernels_not_loaded", library=str(path), why=str(error))
        return None


def _places(directory: Path | None) -> list[Path]:
    """Return where builds may be kept, best first: the user's cache, then a directory of the caller's."""
    places = [] if directory is None else [directory]
    try:
        return [Path.home() / ".cache" / "spillway", *places]
    except RuntimeError:
        return places  # a user without a home
