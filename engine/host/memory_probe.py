"""The speed of host memory, allocated as for the host tier: kind of page, latency, bandwidth. Loads no torch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from common.native.finder import open_first
from common.transport.memory_segment import MemorySegment, PageKind
from engine.kernels.sources import MEMORY

BYTES = 256 << 20  # larger than the processor's caches
_READS = 1 << 20
_REPEATS = 3


class HostMemory(NamedTuple):
    """A segment's measured speed: its kind of pages, the nanoseconds of one dependent read, and the bytes/s read."""

    page_kind: PageKind
    latency_ns: float
    bandwidth: float


def measure_memory(threads: int, size: int = BYTES) -> HostMemory | None:
    """Measure a segment of `size` bytes with `threads` threads, in about a second; None without the compiled kernels.

    OSError if the memory cannot be allocated.
    """
    functions = _load()
    if functions is None:
        return None
    segment = MemorySegment(size)
    memory = np.frombuffer(segment.memory, dtype=np.uint8)
    at, length = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(len(memory))
    latency_ns = functions.spillway_memory_latency(at, length, ctypes.c_int64(_READS))
    # The latency chain's bytes, read as floats, would be subnormal numbers, whose sums are slow.
    memory[:] = 0
    rates = [
        functions.spillway_memory_bandwidth(at, length, ctypes.c_int(threads))
        for _ in range(_REPEATS)
    ]
    return HostMemory(segment.page_kind, latency_ns, max(rates))


def _load() -> ctypes.CDLL | None:
    functions = open_first(MEMORY)
    if functions is not None:
        functions.spillway_memory_latency.restype = ctypes.c_double
        functions.spillway_memory_bandwidth.restype = ctypes.c_double
    return functions
