"""Every build of the decoder's kernels that this processor can run, not only the best; and those for CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import tempfile
from pathlib import Path
from types import ModuleType

from common.native import library
from engine.kernels.sources import DECODER
from engine.models.decoders.compiled_decoder import open_kernels


def decoder_kernels() -> list[ctypes.CDLL]:
    """Return the kernels for AVX-512 with and without bf16, for AVX2, and in plain C++, as far as they run here."""
    flags = set(library.cpu_flags().split())
    place = Path(tempfile.gettempdir()) / f"spillway-kernels-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = []
    for source in DECODER:
        if source.needs <= flags:
            opened = open_kernels(library.compiled_for(source, place))
            assert opened is not None
            found.append(opened)
    return found


def triton_kernels(name: str) -> ModuleType | None:
    """Return a module of CUDA kernels as Triton's interpreter runs them, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"engine.kernels.{name}")
