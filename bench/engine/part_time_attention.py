"""Attention on the host by a helper that has only a share of its core, as one that others use too."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from common.clock import SYSTEM
from engine.decoder.executor.host_attention import (
    HostAttention,
    HostFronts,
    HostResult,
    HostSpan,
    HostSubBatch,
)
from engine.decoder.executor.host_link import Ready
from engine.kernels.attention_plan import QueryRows
from engine.kernels.two_sides import SplitRows


class PartTimeAttention:
    """Lets another one attend, and rests after each layer, so that it works for a `share` of the time (0 to 1)."""

    def __init__(self, inner: HostAttention, share: float, cores: Sequence[int]) -> None:
        """Rest on a thread that keeps to `cores`."""
        self._inner, self._share = inner, share
        self._thread = ThreadPoolExecutor(
            1, "part-time", initializer=os.sched_setaffinity, initargs=(0, tuple(cores))
        )

    def plan(self, queries: Sequence[QueryRows]) -> HostSubBatch:
        """Work out a sub-batch once for all layers; ValueError if a page that a row needs is not there."""
        return _PartTimeSubBatch(self._thread, self._inner.plan(queries), self._share)

    def plan_fronts(self, queries: Sequence[SplitRows]) -> HostFronts:
        """Work out the fronts of a sub-batch, to which the other one attends without a rest."""
        return self._inner.plan_fronts(queries)

    def close(self) -> None:
        """Stop both."""
        self._thread.shutdown()
        self._inner.close()


class _PartTimeSubBatch:
    def __init__(self, thread: ThreadPoolExecutor, inner: HostSubBatch, share: float) -> None:
        self._thread, self._inner, self._share = thread, inner, share

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> HostResult:
        return _PartTimeResult(self._thread.submit(self._attend, group, at, joined, out, ready))

    def _attend(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None
    ) -> HostSpan:
        worked = self._inner.submit(group, at, joined, out, ready).wait()
        time.sleep((worked.end_s - worked.begin_s) * (1 / self._share - 1))
        return worked._replace(end_s=SYSTEM.perf_s())


class _PartTimeResult:
    def __init__(self, future: Future[HostSpan]) -> None:
        self._future = future

    def wait(self) -> HostSpan:
        return self._future.result()
