"""Time a matrix product and a copy of memory, so that a change of the machine's speed between blocks shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from loadgen import stats


class Speed(NamedTuple):
    """How fast the machine was at a moment: GFLOP/s of a float32 matrix product, GB/s read and written by a copy."""

    gflops: float
    gbs: float


def still_blocks(speeds: Sequence[Speed]) -> list[bool]:
    """Say of each block between two measurements whether neither speed moved (see `stats.keep_still`)."""
    by_kind = [stats.keep_still(kind) for kind in zip(*speeds, strict=True)]
    return [all(each) for each in zip(*by_kind, strict=True)]


class Peak:
    """Re-measures the speed of numpy's BLAS and of the memory; `now()` takes about 100 ms."""

    def __init__(self, size: int = 768, repeats: int = 5, mebibytes: int = 64) -> None:
        rng = np.random.default_rng(0)
        self._a = rng.standard_normal((size, size), dtype=np.float32)
        self._b = rng.standard_normal((size, size), dtype=np.float32)
        self._from = np.zeros(mebibytes << 20, dtype=np.uint8)
        self._to = np.ones_like(self._from)
        self._repeats = repeats
        self.now()

    def now(self) -> Speed:
        """Return the best of a few products, and of a few copies."""
        product_s = self._best(lambda: np.dot(self._a, self._b))
        copy_s = self._best(lambda: np.copyto(self._to, self._from))
        return Speed(
            2.0 * self._a.shape[0] ** 3 / product_s / 1e9, 2 * len(self._from) / copy_s / 1e9
        )

    def _best(self, work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(self._repeats):
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
        return best
