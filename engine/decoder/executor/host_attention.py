"""Attention on the host for some of a step's rows, while the device computes others (NEO, section 3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import CDLL
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from common.clock import SYSTEM
from engine.decoder.executor.host_link import Ready
from engine.kernels.attention_plan import QueryRows
from engine.kernels.page_memory import PageMemory
from engine.kernels.partial import Partial
from engine.kernels.two_sides import SplitRows
from engine.models.decoders.compiled_decoder import PlannedAttention, PlannedFront
from engine.models.decoders.spec import DecoderSpec


class HostSpan(NamedTuple):
    """The begin and end of one layer's attention on the host, in seconds of the monotonic clock."""

    begin_s: float
    end_s: float


class HostResult(Protocol):
    """The result of submitted attention."""

    def wait(self) -> HostSpan:
        """Wait until the result is written, or raise the error of the attention."""


class HostSubBatch(Protocol):
    """One sub-batch's sequences that the host attends to in one step, with their page tables."""

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> HostResult:
        """Queue attention in layer `at` of a group, after all earlier submissions, and return at once.

        If `ready` is given, it is called, on any thread, to wait for `joined`, which is still being copied.

        `joined` is fp32 (rows, heads + 2 * kv heads, dim): queries, keys and values. Keys and values go to their
        absolute places in the pages first, so that a layer may be submitted again. The result, fp32 (rows, heads, dim),
        is written to `out`. Both are contiguous, in host memory, and untouched until `wait` returns.
        """


class HostFronts(Protocol):
    """One sub-batch's sequences of which the host attends to the fronts, in one step, with their page tables."""

    def submit(
        self, group: int, at: int, joined: Tensor, found: Partial, ready: Ready | None = None
    ) -> HostResult:
        """Queue attention to the fronts in layer `at` of a group, as `HostSubBatch.submit` does; no page is written.

        The result, in host memory, is to be merged with that of the pages after the fronts.
        """


class HostAttention(Protocol):
    """An implementation of attention to pages in host memory; only the compute thread calls it."""

    def plan(self, queries: Sequence[QueryRows]) -> HostSubBatch:
        """Prepare a sub-batch once for all layers; ValueError if a page that a row needs is missing."""

    def plan_fronts(self, queries: Sequence[SplitRows]) -> HostFronts:
        """Prepare attention to the fronts of a sub-batch's sequences; ValueError as in `front_sides`."""

    def close(self) -> None:
        """Stop; nothing is under way."""


class HostAttentionThread:
    """Attention by the compiled kernels on a thread of this process, which starts further threads.

    The kernels run without the interpreter's lock. All threads take equal numbers of pages.
    """

    def __init__(
        self,
        kernels: CDLL,
        spec: DecoderSpec,
        pools: Sequence[PageMemory],
        *,
        threads: int = 1,
        cores: Sequence[int] = (),
    ) -> None:
        """Attend to pages of packed `pools`, one for each layer group; `cores` are the usable cores (empty: all)."""
        self._kernels, self._spec, self._pools = kernels, spec, list(pools)
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "host-attention", _keep_to, (tuple(cores),))

    def plan(self, queries: Sequence[QueryRows]) -> _ThreadSubBatch:
        """Prepare a sub-batch once for all layers; ValueError if a page that a row needs is missing."""
        planned = PlannedAttention(
            self._kernels, self._spec, queries, self._pools, threads=self._threads, even=True
        )
        return _ThreadSubBatch(self._thread, planned)

    def plan_fronts(self, queries: Sequence[SplitRows]) -> _ThreadFronts:
        """Prepare attention to the fronts of a sub-batch's sequences; ValueError as in `front_sides`."""
        planned = PlannedFront(
            self._kernels, self._spec, queries, self._pools, threads=self._threads
        )
        return _ThreadFronts(self._thread, planned)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()


class _ThreadSubBatch:
    def __init__(self, thread: ThreadPoolExecutor, planned: PlannedAttention) -> None:
        self._thread, self._planned = thread, planned

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> _ThreadResult:
        attend = partial(self._planned.attend, group, at, joined, out)
        return _ThreadResult(self._thread.submit(_timed, attend, ready))


class _ThreadFronts:
    def __init__(self, thread: ThreadPoolExecutor, planned: PlannedFront) -> None:
        self._thread, self._planned = thread, planned

    def submit(
        self, group: int, at: int, joined: Tensor, found: Partial, ready: Ready | None = None
    ) -> _ThreadResult:
        attend = partial(self._planned.attend, group, at, joined, found)
        return _ThreadResult(self._thread.submit(_timed, attend, ready))


def _timed(attend: Callable[[], None], ready: Ready | None) -> HostSpan:
    """Attend once the rows are `ready`, and return the span."""
    if ready is not None:
        ready()
    began = SYSTEM.perf_s()
    attend()
    return HostSpan(began, SYSTEM.perf_s())


class _ThreadResult:
    def __init__(self, future: Future[HostSpan]) -> None:
        self._future = future

    def wait(self) -> HostSpan:
        return self._future.result()


def _keep_to(cores: tuple[int, ...]) -> None:
    """Restrict this thread, and threads that it starts, to some cores, if the system supports it."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
