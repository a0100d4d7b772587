"""Time a matrix product, so that a change of the machine's speed between blocks shows."""

from __future__ import annotations

import time

import numpy as np


class Peak:
    """Re-measures the float32 matrix-product rate of numpy's BLAS; `now()` takes about 50 ms."""

    def __init__(self, size: int = 768, repeats: int = 5) -> None:
        rng = np.random.default_rng(0)
        self._a = rng.standard_normal((size, size), dtype=np.float32)
        self._b = rng.standard_normal((size, size), dtype=np.float32)
        self._repeats = repeats
        self.now()

    def now(self) -> float:
        """Return the best GFLOP/s of a few products."""
        best = float("inf")
        for _ in range(self._repeats):
            began = time.perf_counter()
            np.dot(self._a, self._b)
            best = min(best, time.perf_counter() - began)
        return 2.0 * float(self._a.shape[0]) ** 3 / best / 1e9
