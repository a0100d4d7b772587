"""Attention of a part of a step's rows on the host, beside what the device computes (NEO, section 3)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import CDLL
from typing import NamedTuple, Protocol

from torch import Tensor

from common.clock import SYSTEM
from engine.decoder.executor.host_link import Ready
from engine.kernels.attention_plan import QueryRows
from engine.kernels.page_memory import PageMemory
from engine.models.decoders.compiled_decoder import PlannedAttention
from engine.models.decoders.spec import DecoderSpec


class HostSpan(NamedTuple):
    """When one layer's attention began and ended on the host, in seconds of the clock that does not go back."""

    begin_s: float
    end_s: float


class HostResult(Protocol):
    """Attention that was submitted."""

    def wait(self) -> HostSpan:
        """Return once the result is written; raises what the attention raised."""


class HostSubBatch(Protocol):
    """The sequences of one sub-batch that are attended on the host, with their page tables, in one step."""

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> HostResult:
        """Begin to attend in layer `at` of a group, after what was submitted before, and return at once.

        If `ready` is given, `joined` is read only after it has returned, on whatever thread: it is on its way.

        `joined` is fp32 (rows, heads + 2 * kv heads, dim): queries, keys and values. Keys and values go to their
        absolute places in the pages first, so that a layer may be submitted again. The result, fp32 (rows, heads, dim),
        is written to `out`. Both are contiguous, in host memory, and untouched until `wait` returns.
        """


class HostAttention(Protocol):
    """Attends to pages in host memory. Whoever computes the step is the only caller."""

    def plan(self, queries: Sequence[QueryRows]) -> HostSubBatch:
        """Work out a sub-batch once for all layers; ValueError if a page that a row needs is not there."""

    def close(self) -> None:
        """Stop; nothing is under way."""


class HostAttentionThread:
    """Attends by the compiled kernels on a thread of this process, and threads of its own beside that one.

    The kernels run without the interpreter's lock. Threads take equal numbers of pages.
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
        """Attend to pages of `pools`, packed, one for each layer group; `cores` are those it may use (none: all)."""
        self._kernels, self._spec, self._pools = kernels, spec, list(pools)
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "host-attention", _keep_to, (tuple(cores),))

    def plan(self, queries: Sequence[QueryRows]) -> _ThreadSubBatch:
        """Work out a sub-batch once for all layers; ValueError if a page that a row needs is not there."""
        planned = PlannedAttention(
            self._kernels, self._spec, queries, self._pools, threads=self._threads, even=True
        )
        return _ThreadSubBatch(self._thread, planned)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()


class _ThreadSubBatch:
    def __init__(self, thread: ThreadPoolExecutor, planned: PlannedAttention) -> None:
        self._thread, self._planned = thread, planned

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> _ThreadResult:
        return _ThreadResult(self._thread.submit(self._attend, group, at, joined, out, ready))

    def _attend(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None
    ) -> HostSpan:
        if ready is not None:
            ready()
        began = SYSTEM.perf_s()
        self._planned.attend(group, at, joined, out)
        return HostSpan(began, SYSTEM.perf_s())


class _ThreadResult:
    def __init__(self, future: Future[HostSpan]) -> None:
        self._future = future

    def wait(self) -> HostSpan:
        return self._future.result()


def _keep_to(cores: tuple[int, ...]) -> None:
    """Keep this thread, and those that it starts, to some cores, where the system can."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
