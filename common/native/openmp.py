"""The OpenMP library that torch brings, made visible to compiled kernels whether torch is loaded or not."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path


def open_openmp() -> None:
    """Load torch's OpenMP, so that kernels find its functions there; OSError if it cannot be loaded.

    Kernels are linked without one, so no second pool of threads spins beside torch's.
    """
    torch = find_spec("torch")
    found = (
        [] if torch is None or torch.origin is None
        else sorted((Path(torch.origin).parent / "lib").glob("libgomp*.so*"))
    )  # fmt: skip
    for library in found:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
