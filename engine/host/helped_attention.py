"""Attention on the host by a helper process, and by this process what no helper has done in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from common.errors import ConfigError
from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from engine.decoder.executor.host_attention import (
    HostAttention,
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
from engine.models.decoders.compiled_decoder import PAGE_KINDS
from engine.models.decoders.spec import DecoderSpec

PATIENCE_S = 0.2
SLOWEST = 1e9  # bytes a second: a helper that reads pages more slowly may be late
SLOTS = 4  # more than sub-batches of a step
ROWS = 256
MOST_REST = 256


class HelpedAttention:
    """Attends by the helper at `listener` while there is one, else by `own` (see `HostAttention`).

    A layer is waited for `patience_s` seconds and for as long as a slow machine reads its pages. A helper that is late
    is not asked for the next sub-batches: twice as many each time, until it is in time again. `layers` counts layers of
    sub-batches by who attended: the helper, this worker because the helper was late or had gone, or this worker because
    there was none to ask.
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
        """`own` attends to the same `pools`; keys and values are appended by so many `threads`, as many as compute."""
        self.listener = listener
        self.layers: Counter[AttendedBy] = Counter()
        self.own, self.threads, self.patience_s = own, threads, patience_s
        self._pools = list(pools)
        self._all_layers = sum(len(pool.layers) for pool in pools)
        self._turn = 0
        self._asked: AttentionChannel | None = None
        self._late = self._rest = 0

    def plan(self, queries: Sequence[QueryRows]) -> HostSubBatch:
        """Work out a sub-batch once for all layers; ValueError if a page that a row needs is not there."""
        channel = self.listener.channel
        if channel is not None:
            step = self._tables(queries)
            self._turn = (self._turn + 1) % SLOTS
            if self._trusts(channel) and channel.plan(self._turn, step):
                return _HelpedSubBatch(self, channel, self._turn, queries, step)
            channel.missed(step)
        self.layers["worker"] += self._all_layers
        return self.own.plan(queries)

    @property
    def link(self) -> HelperLink | None:
        """The way to the helper that is attached; None without one."""
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
        """Let the helper go, and stop."""
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
        """Return how long a layer of a group is waited for: a slow machine reads its pages meanwhile."""
        reading_s = len(step.tables[group]) * self._pools[group].data[0, 0].nbytes / SLOWEST
        return 0.0 if self._rest else max(0.0, self.patience_s + reading_s)

    def _trusts(self, channel: AttentionChannel) -> bool:
        if channel is not self._asked:
            self._asked, self._late, self._rest = channel, 0, 0
        self._rest = max(0, self._rest - 1)
        return not self._rest and channel.ready()

    def _tables(self, queries: Sequence[QueryRows]) -> StepTables:
        step = lay_out(queries, self._pools)
        tables = [table.astype(np.int32) for table in step.tables]
        return StepTables(step.positions, step.ends, tables, step.starts)


class _HelpedSubBatch:
    """A sub-batch that the helper attends to, until it is late."""

    def __init__(
        self,
        attention: HelpedAttention,
        channel: AttentionChannel,
        slot: int,
        queries: Sequence[QueryRows],
        step: StepTables,
    ) -> None:
        self._attention, self._channel, self._slot = attention, channel, slot
        self._queries, self._step = queries, step
        self._own: HostSubBatch | None = None

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> HostResult:
        if ready is not None:
            ready()  # the helper reads at once
        if self._own is not None:
            return self.alone(group, at, joined, out)
        self._channel.submit(self._slot, group, at, joined.data_ptr(), self._attention.threads)
        return _HelpedResult(self, group, at, joined, out)

    def alone(self, group: int, at: int, joined: Tensor, out: Tensor) -> HostResult:
        """Attend in this process, from now on."""
        if self._own is None:
            self._own = self._attention.own.plan(self._queries)
            self._channel.missed(self._step)
        self._attention.layers["late"] += 1
        return self._own.submit(group, at, joined, out)

    def wait(self, group: int, out: Tensor) -> HostSpan | None:
        """Wait for the helper; None if it is late or has gone."""
        patience_s = self._attention.waits_s(group, self._step)
        span = self._channel.wait(self._slot, out.data_ptr(), patience_s)
        if span is None:
            self._attention.too_late()
            return None
        self._attention.in_time()
        return HostSpan(*span)


class _HelpedResult:
    def __init__(
        self, batch: _HelpedSubBatch, group: int, at: int, joined: Tensor, out: Tensor
    ) -> None:
        self._batch, self._group, self._at, self._joined, self._out = batch, group, at, joined, out

    def wait(self) -> HostSpan:
        span = self._batch.wait(self._group, self._out)
        if span is None:
            return self._batch.alone(self._group, self._at, self._joined, self._out).wait()
        return span


def helped(
    own: HostAttention,
    address: HelperAddress,
    spec: DecoderSpec,
    pools: Sequence[PageMemory],
    segment: MemorySegment,
    *,
    threads: int,
) -> HelpedAttention:
    """Return attention with the help of who attaches at an address; ConfigError if nobody can.

    `pools` are the parts of `segment`; as many `threads` append keys and values as compute, or teams are made anew.
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
        # Tables grow with a sequence: more pages than the longest has are named by no row.
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
