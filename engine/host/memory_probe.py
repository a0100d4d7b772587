"""The speed of host memory as the host tier takes it: kind of page, latency, bandwidth. Loads no torch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from common.native.finder import find
from common.native.openmp import open_openmp
from common.transport.memory_segment import MemorySegment, PageKind
from engine.kernels.sources import MEMORY

BYTES = 256 << 20  # more than caches hold
_READS = 1 << 20
_REPEATS = 3


class HostMemory(NamedTuple):
    """Of a segment: the kind of its pages, nanoseconds of a read that waits for the one before, and bytes/s read."""

    page_kind: PageKind
    latency_ns: float
    bandwidth: float


def measure_memory(threads: int, size: int = BYTES) -> HostMemory | None:
    """Measure a segment of so many bytes, by so many threads, in about a second; None without the compiled kernels.

    OSError if there is no memory for it.
    """
    functions = _load()
    if functions is None:
        return None
    segment = MemorySegment(size)
    memory = np.frombuffer(segment.memory, dtype=np.uint8)
    at, length = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(len(memory))
    latency_ns = functions.spillway_memory_latency(at, length, ctypes.c_int64(_READS))
    # The chain would be summed as numbers too small to be added fast.
    memory[:] = 0
    rates = [
        functions.spillway_memory_bandwidth(at, length, ctypes.c_int(threads))
        for _ in range(_REPEATS)
    ]
    return HostMemory(segment.page_kind, latency_ns, max(rates))


def _load() -> ctypes.CDLL | None:
    for source in MEMORY:
        path = find(source)
        if path is None:
            continue
        try:
            open_openmp()
            functions = ctypes.CDLL(str(path))
        except OSError:
            continue
        functions.spillway_memory_latency.restype = ctypes.c_double
        functions.spillway_memory_bandwidth.restype = ctypes.c_double
        return functions
    return None
