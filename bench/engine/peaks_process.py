"""What the processor can do at the most, in a process of its own, fed with lines of JSON as engines are.

`python -m bench.engine.peaks_process THREADS` answers {"read": {}}, READ_BYTES of memory read, and
{"product": {"bits"}}, matrix products of PRODUCT operations in bf16 (16) or int8 (8), with {"seconds"}.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import torch

from engine.models.decoders.compiled_decoder import load_kernels

READ_BYTES, SIDE, TIMES = 512 << 20, 2048, 8
PRODUCT = TIMES * 2 * SIDE**3


class Peaks:
    """Memory to read, and matrices to multiply: torch's kernels, which are oneDNN's."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        kernels = load_kernels()
        if kernels is None:
            raise RuntimeError("there are no compiled kernels here; expected a C++ compiler")
        self._kernels, self._threads = kernels, threads
        self._memory = torch.ones(READ_BYTES // 4)
        self._half = [torch.randn(SIDE, SIDE).to(torch.bfloat16) for _ in range(2)]
        self._bytes = [torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8) for _ in range(2)]

    def read(self) -> float:
        """Return the seconds of summing READ_BYTES of memory, with prefetching."""
        began = time.perf_counter()
        self._kernels.spillway_read(
            ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_int64(self._memory.numel()), self._threads
        )  # fmt: skip
        return time.perf_counter() - began

    def product(self, bits: int) -> float:
        """Return the seconds of PRODUCT operations."""
        began = time.perf_counter()
        for _ in range(TIMES):
            if bits == 8:
                torch._int_mm(*self._bytes)
            else:
                torch.mm(*self._half)
        return time.perf_counter() - began


def main() -> None:
    """Answer until standard input ends."""
    began = time.perf_counter()
    peaks = Peaks(int(sys.argv[1]))
    _answer({"started_s": time.perf_counter() - began})
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        _answer({"seconds": getattr(peaks, what)(**arguments)})


def _answer(value: dict[str, float]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
