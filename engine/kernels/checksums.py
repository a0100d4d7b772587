"""Checksums of pages: XXH3 of many equal pieces of memory at once, natively where there are kernels."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.native.finder import open_first
from engine.kernels.sources import CHECKSUMS

_SHORTEST = 241  # bytes: XXH3 hashes shorter pieces in other ways, which the kernel lacks


def checksums(
    memory: NDArray[np.uint8], offsets: NDArray[np.int64], size: int, threads: int = 1
) -> NDArray[np.uint64]:
    """Return the XXH3 hash of each piece of `size` bytes that begins at an offset of `memory`, which is contiguous.

    The kernel lets Python's other threads run, and hashes with up to `threads` threads.
    """
    found = np.empty(len(offsets), dtype=np.uint64)
    kernel = _kernel() if size >= _SHORTEST and memory.flags.c_contiguous else None
    if kernel is None:
        flat = memory.reshape(-1)
        for place, offset in enumerate(offsets.tolist()):
            found[place] = xxhash.xxh3_64_intdigest(flat[offset : offset + size].data)
        return found
    at = np.ascontiguousarray(offsets, dtype=np.int64)
    kernel.spillway_checksums(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_void_p(at.ctypes.data),
        ctypes.c_int64(len(at)), ctypes.c_int64(size),
        ctypes.c_void_p(found.ctypes.data), ctypes.c_int(threads),
    )  # fmt: skip
    return found


@cache
def _kernel() -> ctypes.CDLL | None:
    return open_first(CHECKSUMS)
