"""The TCP channel from a gpu_worker to a helper on another machine: sends pages and rows, receives attended rows.

The gpu_worker keeps all pages and appends to them itself. So it can compute any layer that the helper has not finished
in time, and the death of a helper loses no page. The helper has copies of the pages that it was asked to attend to.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from common import log
from common.clock import SYSTEM
from common.cost.linear import LinearCost, Probe
from common.cost.online import OnlineCost
from common.transport.frames import CALL, MAX_PAYLOAD, RESULT, BadFrame, frame
from common.transport.memory_segment import MemorySegment
from engine.decoder.executor.interface import Moved
from engine.host.channel import ChannelLayout, ChannelLibrary, HostChannel, StepTables
from engine.host.page_mirror import Ints, PageMirror, PageNeeds
from engine.host.tcp_messages import (
    ATTEND,
    ATTEND_HEAD,
    PAGES,
    PAGES_HEAD,
    PLAN,
    PLAN_HEAD,
    RESULT_HEAD,
    SlotArguments,
    hang_up,
    read_frames,
)
from engine.kernels.page_memory import PageMemory

BESIDE_S = 0.1  # pages of a layer that take longer to send are sent ahead, before the helper is asked for a step
AHEAD_BYTES = 64 << 20  # the most bytes of pages sent ahead for one step
FRAME_BYTES = 4 << 20  # bytes of pages in one frame
_LONGEST_S = 1e6
_log = log.get("engine")


class _Asked(NamedTuple):
    """A submitted layer: when, its bytes both ways, and whether its time is used to fit the link's cost."""

    at_s: float
    size: int
    timed: bool


class _Answer(NamedTuple):
    payload: bytes
    asked: _Asked
    at_s: float


class _Slot:
    """A slot's step: its rows and page needs, and the number of its latest call."""

    def __init__(self, rows: int, needs: Sequence[PageNeeds]) -> None:
        self.rows, self.needs = rows, needs
        self.number, self.timed = 0, False


class TcpChannel:
    """An attachment over TCP (see `AttentionChannel`), with a thread that reads and a thread that writes.

    `moved` counts the bytes of sent rows, sent pages and received results. `gone` becomes readable once the helper
    has gone.
    """

    def __init__(
        self,
        connection: socket.socket,
        library: ChannelLibrary,
        layout: ChannelLayout,
        pools: Sequence[PageMemory],
        segment: MemorySegment,
        probes: Sequence[Probe],
        moved: Counter[Moved],
    ) -> None:
        """Take over a connection after its handshake; `probes` are timed echoes, with the bytes as tokens."""
        self.layout, self.moved = layout, moved
        self._connection, self._cost = connection, OnlineCost(probes)
        connection.settimeout(None)
        # No other process attaches to these slots: they hold the step's arguments for appending in this process.
        slots = MemorySegment(library.slot_bytes(layout), large=False)
        self._local = HostChannel(library, layout, slots.memory, segment.memory, owner=True)
        self._mirror = PageMirror(pools)
        self._slots: dict[int, _Slot] = {}
        self._last = 0
        self._changed = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._unanswered: dict[int, _Asked] = {}
        self._wanted: set[int] = set()
        self._answers: dict[int, _Answer] = {}
        self._ended = False
        self.gone, self._bell = socket.socketpair()
        self._threads = [
            threading.Thread(target=each, name=f"host-helper-{each.__name__}", daemon=True)
            for each in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def cost(self) -> LinearCost:
        """The fitted seconds of a round trip to the helper, by the bytes of both ways (as tokens)."""
        return self._cost.cost

    # -- the compute thread

    def ready(self) -> bool:
        """True while all messages are sent and every call has been answered, in time or late."""
        with self._changed:
            return not (self._ended or self._backlog or self._unanswered)

    def plan(self, slot: int, step: StepTables) -> bool:
        """Send a step's arguments; False if they do not fit, or the helper lacks many pages: these are sent ahead."""
        if step.fronts is not None:
            return False  # the helper's pages follow what is appended, and results have one form
        rows = len(step.positions)
        wide = self.layout.joined_bytes(rows)
        arguments = msgspec.msgpack.encode(SlotArguments.of(step))
        if max(wide, len(arguments)) + ATTEND_HEAD.size > MAX_PAYLOAD:
            return False
        if self._ended or not self._local.plan(slot, step):
            return False
        needs = self._mirror.needs(step)
        if self.cost.alpha_tokens_s * self._mirror.most_lacking(needs) > BESIDE_S:
            self._send_ahead(needs)
            return False
        self._slots[slot] = _Slot(rows, needs)
        self._call(PLAN_HEAD.pack(PLAN, slot) + arguments)
        return True

    def submit(self, slot: int, group: int, layer: int, joined: int, threads: int) -> None:
        """Append keys and values; send the rows, and the layer's pages that the helper lacks (see `HostChannel`)."""
        self._local.append(slot, group, layer, joined, threads)
        planned = self._slots[slot]
        needs = planned.needs[group]
        lacking = np.flatnonzero(self._mirror.lacking(group, layer, needs))
        pages = self._send_pages(group, layer, needs, lacking)
        wide, out = self.layout.joined_bytes(planned.rows), self.layout.out_bytes(planned.rows)
        rows = ctypes.string_at(joined, wide)
        planned.number = self._last = self._last + 1 & 0xFFFFFFFF
        asked = _Asked(SYSTEM.perf_s(), pages + wide + out, not planned.timed)
        planned.timed = True
        with self._changed:
            self._unanswered[self._last] = asked
            self._wanted.add(self._last)
        self._call(ATTEND_HEAD.pack(ATTEND, slot, group, layer) + rows, self._last)
        self.moved["rows"] += wide
        self._mirror.appended(group, layer, needs)

    def wait(self, slot: int, out: int, patience_s: float) -> tuple[float, float] | None:
        """Wait for the submitted layer (see `HostChannel`); the times may be off by half a round trip."""
        planned = self._slots[slot]
        number = planned.number
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._answers or self._ended,
                min(max(0.0, patience_s), _LONGEST_S),
            )
            self._wanted.discard(number)
            answer = self._answers.pop(number, None)
        if answer is None:
            return None
        size = self.layout.out_bytes(planned.rows)
        if len(answer.payload) != RESULT_HEAD.size + size:
            _log.warning("host_helper_answered_wrongly", bytes=len(answer.payload))
            self.end()
            return None
        ctypes.memmove(out, answer.payload[RESULT_HEAD.size :], size)
        self.moved["results"] += size
        return self._span(answer)

    def missed(self, step: StepTables) -> None:
        """Record that this process alone appends the keys and values of a step's rows."""
        self._mirror.missed(step)

    def _span(self, answer: _Answer) -> tuple[float, float]:
        """Return when a layer's attention began and ended, by this machine's clock; learn the round trip's cost."""
        received, began, ended, answered = (
            each / 1e9 for each in RESULT_HEAD.unpack_from(answer.payload)
        )
        asked = answer.asked
        way_s = max(1e-9, answer.at_s - asked.at_s - (answered - received))
        if asked.timed:
            self._cost.observe(0, asked.size, way_s)
        end_s = answer.at_s - way_s / 2 - (answered - ended)
        return end_s - (ended - began), end_s

    # -- pages

    def _send_ahead(self, needs: Sequence[PageNeeds]) -> None:
        """Send pages that the helper lacks, in all layers, up to AHEAD_BYTES."""
        left = AHEAD_BYTES
        for group, each in enumerate(needs):
            for layer in range(self.layout.groups[group].layers):
                lacking = np.flatnonzero(self._mirror.lacking(group, layer, each))
                left -= self._send_pages(group, layer, each, lacking)
                if left <= 0:
                    return

    def _send_pages(self, group: int, layer: int, needs: PageNeeds, chosen: Ints) -> int:
        """Send one layer of some pages; return the number of bytes."""
        each = self._mirror.page_bytes(group)
        at_once, sent = max(1, FRAME_BYTES // each), 0
        for begin in range(0, len(chosen), at_once):
            pages, data = self._mirror.read(group, layer, needs, chosen[begin : begin + at_once])
            head = PAGES_HEAD.pack(PAGES, group, layer, len(pages))
            self._call(head + pages.astype(np.int32).tobytes() + data)
            sent += len(data)
        self.moved["pages"] += sent
        return sent

    # -- the connection

    def _call(self, payload: bytes, number: int = 0) -> None:
        """Send a frame without waiting: the writing thread sends whatever the connection does not take at once."""
        data = memoryview(frame(CALL, number, payload))
        with self._changed:
            if self._ended:
                return
            if not self._backlog:
                try:
                    data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the reading thread notices the end
            if data:
                self._backlog.append(data)
                self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._ended)
                if self._ended:
                    return
                data = self._backlog[0]
            try:
                self._connection.sendall(data)
            except OSError:
                self.end()
                return
            with self._changed:
                self._backlog.popleft()

    def _read(self) -> None:
        try:
            read_frames(self._connection, self._take)
        except (OSError, BadFrame) as error:
            _log.warning("host_helper_lost", why=str(error))
        finally:
            self.end()

    def _take(self, kind: int, number: int, _left_ms: int, payload: bytes) -> None:
        now = SYSTEM.perf_s()
        with self._changed:
            asked = self._unanswered.pop(number, None)
            if kind != RESULT or asked is None:
                raise BadFrame(f"a frame of kind {kind} that answers nothing")
            if number in self._wanted:
                self._wanted.remove(number)
                self._answers[number] = _Answer(payload, asked, now)
                self._changed.notify_all()

    def end(self) -> None:
        """Hand no more work to the helper, and wake all waiting threads; any thread may call this."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        hang_up(self._connection)
        self._bell.close()

    def close(self) -> None:
        """Detach the helper; a thread of this channel must not call this."""
        self.end()
        for thread in self._threads:
            thread.join()
        self._connection.close()
        self.gone.close()
