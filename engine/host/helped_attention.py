"""Helped attention: a helper process attends on the host; this process attends where the helper is late or absent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from engine.decoder.executor.host_attention import (
    HostAttention,
    HostFronts,
    HostResult,
    HostSpan,
    HostSubBatch,
)
from engine.decoder.executor.host_link import Ready
from engine.decoder.executor.interface import AttendedBy, HelperLink
from engine.host.channel import (
    AttentionChannel,
    ChannelLayout,
    GroupLayout,
    StepTables,
    load_channel,
)
from engine.host.listener import HelperAcceptor, HelperListener, UnixAcceptor
from engine.host.tcp_acceptor import TcpAcceptor
from engine.host.tcp_channel import TcpChannel
from engine.kernels.attention_plan import QueryRows, lay_out
from engine.kernels.page_memory import PageMemory
from engine.kernels.partial import Partial
from engine.kernels.two_sides import SplitRows, front_sides
from engine.models.decoders.compiled_decoder import PAGE_KINDS
from engine.models.decoders.spec import DecoderSpec

PATIENCE_S = 0.2
SLOWEST = 1e9  # bytes a second: a helper that reads pages more slowly may be late
SLOTS = 8  # more than a step has sub-batches, each with and without fronts
ROWS = 256
MOST_REST = 256
Found_contra = TypeVar("Found_contra", contravariant=True)  # a tensor, or a `Partial` of fronts


class HelpedAttention:
    """Attention by the helper attached at `listener`, else by `own` (see `HostAttention`).

    The wait for a layer is `patience_s` plus the seconds in which a slow machine reads the layer's pages. A helper that
    is late skips the next sub-batches, twice as many after each further delay, until it is in time again. `layers`
    counts sub-batch layers by who attended: the helper; this worker, since the helper was late or had gone; or this
    worker, since there was no helper to ask.
    """

    def __init__(
        self,
        own: HostAttention,
        listener: HelperListener,
        pools: Sequence[PageMemory],
        *,
        threads: int = 1,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`own` attends to the same `pools`; `threads` append keys and values: as many as compute the step."""
        self.listener = listener
        self.layers: Counter[AttendedBy] = Counter()
        self.own, self.threads, self.patience_s = own, threads, patience_s
        self._pools = list(pools)
        self._all_layers = sum(len(pool.layers) for pool in pools)
        self._turn = 0
        self._asked: AttentionChannel | None = None
        self._late = self._rest = 0

    def plan(self, queries: Sequence[QueryRows]) -> HostSubBatch:
        """Prepare a sub-batch once for all layers; ValueError if a page that a row needs is missing."""
        channel = self.listener.channel
        if channel is not None:
            step = self._tables(queries)
            if self._planned(channel, step):

                def own() -> HostSubBatch:
                    planned = self.own.plan(queries)
                    channel.missed(step)
                    return planned

                return _HelpedSubBatch(self, channel, self._turn, step, own, _Answer)
            channel.missed(step)
        self.layers["worker"] += self._all_layers
        return self.own.plan(queries)

    def plan_fronts(self, queries: Sequence[SplitRows]) -> HostFronts:
        """Prepare attention to the fronts of a sub-batch's sequences; ValueError as in `front_sides`.

        A helper on another machine gets none, since its copies of pages follow what is appended.
        """
        channel = self.listener.channel
        if channel is not None:
            fronts = np.array([rows.front for rows in queries], np.int64)
            step = self._tables(front_sides(queries, self._pools), whole=False)._replace(
                fronts=fronts
            )
            if self._planned(channel, step):
                own = partial(self.own.plan_fronts, queries)
                return _HelpedSubBatch(self, channel, self._turn, step, own, _Answer.of_fronts)
        self.layers["worker"] += self._all_layers
        return self.own.plan_fronts(queries)

    @property
    def link(self) -> HelperLink | None:
        """The link to the attached helper; None without a helper."""
        channel = self.listener.channel
        if not isinstance(channel, TcpChannel):
            return None if channel is None else HelperLink("unix")
        layout = channel.layout
        return HelperLink(
            "tcp",
            channel.cost,
            layout.joined_bytes(1) + layout.out_bytes(1),
            self._all_layers * layout.layer_bytes,
            channel.moved,
        )

    def close(self) -> None:
        """Detach the helper, and stop attention on the host."""
        self.listener.close()
        self.own.close()

    def in_time(self) -> None:
        """Note that the helper attended to a layer."""
        self.layers["helper"] += 1
        self._late = 0

    def too_late(self) -> None:
        """Note that the helper kept a layer waiting, or has gone."""
        self._late += 1
        self._rest = min(1 << self._late, MOST_REST)

    def waits_s(self, group: int, step: StepTables) -> float:
        """Return the seconds to wait for a layer: the patience, and the time of a slow machine to read its pages."""
        reading_s = len(step.tables[group]) * self._pools[group].data[0, 0].nbytes / SLOWEST
        return 0.0 if self._rest else max(0.0, self.patience_s + reading_s)

    def _planned(self, channel: AttentionChannel, step: StepTables) -> bool:
        """Take the next slot; return whether the helper will attend to the step that the slot now holds."""
        self._turn = (self._turn + 1) % SLOTS
        return self._trusts(channel) and channel.plan(self._turn, step)

    def _trusts(self, channel: AttentionChannel) -> bool:
        if channel is not self._asked:
            self._asked, self._late, self._rest = channel, 0, 0
        self._rest = max(0, self._rest - 1)
        return not self._rest and channel.ready()

    def _tables(self, queries: Sequence[QueryRows], *, whole: bool = True) -> StepTables:
        step = lay_out(queries, self._pools, whole=whole)
        tables = [table.astype(np.int32) for table in step.tables]
        return StepTables(step.positions, step.ends, tables, step.starts)


class _Own(Protocol[Found_contra]):
    """Attention of a sub-batch in this process (`HostSubBatch` or `HostFronts`)."""

    def submit(
        self, group: int, at: int, joined: Tensor, out: Found_contra, ready: Ready | None = None
    ) -> HostResult: ...


class _HelpedSubBatch(Generic[Found_contra]):
    """A sub-batch that the helper attends to, wholly or its fronts; after a late layer this process does the rest.

    `own` plans the same attention in this process; `answer` takes what the helper found for a result.
    """

    def __init__(
        self,
        attention: HelpedAttention,
        channel: AttentionChannel,
        slot: int,
        step: StepTables,
        own: Callable[[], _Own[Found_contra]],
        answer: Callable[[Found_contra], _Answer],
    ) -> None:
        self._attention, self._channel, self._slot, self._step = attention, channel, slot, step
        self._plan_own, self._answer = own, answer
        self._own: _Own[Found_contra] | None = None

    def submit(
        self, group: int, at: int, joined: Tensor, out: Found_contra, ready: Ready | None = None
    ) -> HostResult:
        if ready is not None:
            ready()  # the helper reads the rows as soon as they are submitted
        if self._own is not None:
            return self.alone(group, at, joined, out)
        self._channel.submit(self._slot, group, at, joined.data_ptr(), self._attention.threads)
        return _HelpedResult(self, group, at, joined, out)

    def alone(self, group: int, at: int, joined: Tensor, out: Found_contra) -> HostResult:
        """Attend in this layer and all later ones in this process."""
        if self._own is None:
            self._own = self._plan_own()
        self._attention.layers["late"] += 1
        return self._own.submit(group, at, joined, out)

    def wait(self, group: int, out: Found_contra) -> HostSpan | None:
        """Wait for the helper; None if it is late or has gone."""
        answer = self._answer(out)
        patience_s = self._attention.waits_s(group, self._step)
        span = self._channel.wait(self._slot, answer.came.data_ptr(), patience_s)
        if span is None:
            self._attention.too_late()
            return None
        self._attention.in_time()
        answer.take()
        return HostSpan(*span)


class _HelpedResult(Generic[Found_contra]):
    def __init__(
        self,
        batch: _HelpedSubBatch[Found_contra],
        group: int,
        at: int,
        joined: Tensor,
        out: Found_contra,
    ) -> None:
        self._batch, self._group, self._at, self._joined, self._out = batch, group, at, joined, out

    def wait(self) -> HostSpan:
        span = self._batch.wait(self._group, self._out)
        if span is None:
            return self._batch.alone(self._group, self._at, self._joined, self._out).wait()
        return span


class _Answer(NamedTuple):
    """The memory into which a helper's answer comes, and the parts of a result that are copied from it, in order."""

    came: Tensor
    parts: Sequence[Tensor] = ()

    @classmethod
    def of_fronts(cls, found: Partial) -> _Answer:
        """Return the answer about fronts, which comes in one piece."""
        return cls(torch.empty(sum(each.numel() for each in found)), found)

    def take(self) -> None:
        """Copy what came to the result, if it did not come there."""
        ends = accumulate(each.numel() for each in self.parts)
        for part, end in zip(self.parts, ends, strict=True):
            part.copy_(self.came[end - part.numel() : end].view_as(part))


def helped(
    own: HostAttention,
    address: HelperAddress,
    spec: DecoderSpec,
    pools: Sequence[PageMemory],
    segment: MemorySegment,
    *,
    threads: int,
) -> HelpedAttention:
    """Return attention that a helper attached at `address` may take over; ConfigError if no helper can attach.

    `pools` lie in `segment`. `threads` append keys and values: as many as compute the step, since OpenMP would
    otherwise build a new team of threads at each change of their number.
    """
    library = load_channel()
    if library is None or segment.file < 0:
        raise ConfigError(
            f"SPILLWAY_HOST_SOCKET is '{address}': a helper needs Linux and the compiled kernels; expected nothing here"
        )
    acceptor: HelperAcceptor = (
        UnixAcceptor(address.path, library, segment)
        if address.kind == "unix"
        else TcpAcceptor(address, library, pools, segment)
    )
    listener = HelperListener(acceptor, _layout(spec, pools, segment))
    return HelpedAttention(own, listener, pools, threads=threads)


def _layout(
    spec: DecoderSpec, pools: Sequence[PageMemory], segment: MemorySegment
) -> ChannelLayout:
    return ChannelLayout(
        epoch=0,
        slots=SLOTS,
        rows=ROWS,
        # A page table grows with its sequence; no row names more pages than the longest sequence has.
        entries=ROWS * -(-spec.positions // PAGE),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        dim=spec.head_dim,
        scale=spec.attention_scale,
        cap=spec.score_cap,
        kind=PAGE_KINDS[pools[0].data.dtype],
        groups=[
            GroupLayout(pool.offset, pool.pages, len(pool.layers), pool.window or 0)
            for pool in pools
        ],
        page_bytes=segment.size,
        layer_bytes=pools[0].data[0, 0].nbytes,
    )
