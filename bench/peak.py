"""The machine's speed between blocks of measurements: a matrix product, a copy of memory, and CPU time stolen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loadgen import stats

STOLEN = 0.02  # a block counts if the host took at most this share of the CPU time
_FEWEST = 3  # fewer stolen ticks are noise
_REST_S = 0.1  # BLAS' threads spin for some 30 ms after a product, which would slow what follows
_STAT = Path("/proc/stat")


class Speed(NamedTuple):
    """How fast the machine was at a moment: GFLOP/s of a float32 matrix product, GB/s read and written by a copy.

    `stolen` is the share of CPU time that the host of a virtual machine gave to others since the last measurement.
    """

    gflops: float
    gbs: float
    stolen: float = 0.0


class CpuTicks(NamedTuple):
    """CPU time of all cores since the machine started, and what of it the host gave to others, in ticks."""

    total: int = 0
    stolen: int = 0


def still_blocks(speeds: Sequence[Speed]) -> list[bool]:
    """Say of each block between two measurements whether no speed moved (`stats.keep_still`) and no CPU was stolen."""
    products = stats.keep_still([each.gflops for each in speeds])
    copies = stats.keep_still([each.gbs for each in speeds])
    whole = [each.stolen <= STOLEN for each in speeds[1:]]
    return [all(each) for each in zip(products, copies, whole, strict=True)]


def counting(still: Iterable[bool]) -> list[bool]:
    """Say of each block whether it counts: those that were still, or all if none was."""
    found = list(still)
    return found if any(found) else [True] * len(found)


def as_samples(speeds: Sequence[Speed]) -> dict[str, list[float]]:
    """Return speeds as a row's document keeps them: a list of each kind."""
    return {
        "peaks_gflops": [each.gflops for each in speeds],
        "peaks_gbs": [each.gbs for each in speeds],
        "stolen": [each.stolen for each in speeds],
    }


def read_ticks(stat: Path = _STAT) -> CpuTicks:
    """Return the ticks of Linux' /proc/stat; none where there is no such file."""
    try:
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return CpuTicks()
    return CpuTicks(sum(ticks), ticks[7])


def stolen_share(before: CpuTicks, after: CpuTicks) -> float:
    """Return the stolen share of the CPU time between two readings; 0 for a few ticks, which are noise."""
    stolen = after.stolen - before.stolen
    return stolen / (after.total - before.total) if stolen >= _FEWEST else 0.0


class Peak:
    """Measures the speed of numpy's BLAS and of the memory, and stolen CPU time; `now()` takes about 200 ms."""

    def __init__(self, size: int = 768, repeats: int = 5, mebibytes: int = 64) -> None:
        rng = np.random.default_rng(0)
        self._a = rng.standard_normal((size, size), dtype=np.float32)
        self._b = rng.standard_normal((size, size), dtype=np.float32)
        self._from = np.zeros(mebibytes << 20, dtype=np.uint8)
        self._to = np.ones_like(self._from)
        self._repeats = repeats
        self._ticks = read_ticks()
        self.now()

    def now(self) -> Speed:
        """Return the best of a few products, and of a few copies, and the share stolen since the last call."""
        before, self._ticks = self._ticks, read_ticks()
        product_s = self._best(lambda: np.dot(self._a, self._b))
        copy_s = self._best(lambda: np.copyto(self._to, self._from))
        time.sleep(_REST_S)
        return Speed(
            2.0 * self._a.shape[0] ** 3 / product_s / 1e9,
            2 * len(self._from) / copy_s / 1e9,
            stolen_share(before, self._ticks),
        )

    def _best(self, work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(self._repeats):
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
        return best
