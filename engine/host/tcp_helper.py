"""The TCP helper: attends on another machine than its gpu_worker, to copies of the pages that the worker sends."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from common import log
from common.clock import SYSTEM
from common.errors import ConfigError
from common.transport.frames import CALL, RESULT, BadFrame, frame
from common.transport.memory_segment import MemorySegment
from common.types.helper_address import HelperAddress
from engine.host.channel import ChannelLayout, ChannelLibrary, HostChannel
from engine.host.handshake import HelperAttached
from engine.host.tcp_messages import (
    ATTEND,
    ATTEND_HEAD,
    ECHO,
    NONCE_BYTES,
    PAGES,
    PAGES_HEAD,
    PLAN,
    PLAN_HEAD,
    RESULT_HEAD,
    TIMEOUT_S,
    VERSION,
    Greeting,
    SlotArguments,
    TcpChallenge,
    TcpHello,
    TcpWelcome,
    hang_up,
    prove,
    proves,
    read_frames,
    tune,
)

NEVER_S = 1e9
_log = log.get("work")


class _Asked(NamedTuple):
    """A call to attend to one layer: its number, its slot and rows, and when it was received."""

    number: int
    slot: int
    rows: int
    received_ns: int


class TcpHelper:
    """An attachment to a gpu_worker over TCP; the helper allocates memory for as many pages as the worker has.

    One thread receives, writes pages to memory and hands rows to the native library, which attends on the thread that
    calls `serve`; a third thread sends the results. Both sides of a shared-memory channel lie in this process.
    """

    def __init__(self, address: HelperAddress, library: ChannelLibrary) -> None:
        """Attach; OSError if no worker has a free place or memory is short, ConfigError if a side refuses the other."""
        self.connection = socket.create_connection((address.host, address.port), TIMEOUT_S)
        try:
            tune(self.connection)
            self._attach(address, library)
        except BaseException:
            self.connection.close()
            raise
        self.connection.settimeout(None)

    def serve(self, threads: int, slowdown: int = 1) -> int:
        """Attend until the worker has gone or `stop` is called; return how many layers were done in time."""
        beside = [
            threading.Thread(target=each, name=f"gpu-worker-{each.__name__}", daemon=True)
            for each in (self._read, self._answer)
        ]
        for thread in beside:
            thread.start()
        try:
            return self._serving.serve(threads, slowdown)
        finally:
            hang_up(self.connection)
            for thread in beside:
                thread.join()

    def stop(self) -> None:
        """Make `serve` return; any thread may call this."""
        hang_up(self.connection)
        self._serving.stop()

    def close(self) -> None:
        """End the attachment, after `serve` has returned."""
        self.connection.close()

    def _attach(self, address: HelperAddress, library: ChannelLibrary) -> None:
        greeting, nonce = Greeting(self.connection), secrets.token_bytes(NONCE_BYTES)
        said = (greeting.hear(TcpChallenge).nonce, nonce, library.digest.encode())
        proof = prove(address.secret, "helper", *said)
        greeting.say(TcpHello(VERSION, library.digest, nonce, proof))
        welcome = greeting.hear(TcpWelcome)
        if welcome.refusal:
            why = f"the gpu_worker at {address} refuses this helper: {welcome.refusal}"
            raise ConnectionRefusedError(why) if welcome.taken else ConfigError(why)
        if not proves(welcome.proof, address.secret, "gpu_worker", *said, welcome.layout):
            raise ConfigError(
                f"who listens at {address} does not know the secret; expected one SPILLWAY_HOST_SECRET on both sides"
            )
        try:
            self._take_memory(library, msgspec.msgpack.decode(welcome.layout, type=ChannelLayout))
        except (OSError, msgspec.MsgspecError) as error:
            greeting.say(HelperAttached(failure=str(error)))
            raise ConnectionError(f"not attached: {error}") from error
        greeting.say(HelperAttached())

    def _take_memory(self, library: ChannelLibrary, layout: ChannelLayout) -> None:
        pages = MemorySegment(layout.page_bytes)
        slots = MemorySegment(library.slot_bytes(layout), large=False)
        self._layout = layout
        self._owning, self._serving = (
            HostChannel(library, layout, slots.memory, pages.memory, owner=owner)
            for owner in (True, False)
        )
        memory = np.frombuffer(pages.memory, np.uint8)
        self._pages: list[NDArray[np.uint8]] = []
        for group in layout.groups:
            size = group.pages * group.layers * layout.layer_bytes
            part = memory[group.offset : group.offset + size]
            self._pages.append(part.reshape(group.pages, group.layers, layout.layer_bytes))
        self._rows: dict[int, int] = {}
        self._busy: set[int] = set()
        self._answers: SimpleQueue[_Asked | None] = SimpleQueue()
        self._sending = threading.Lock()

    # -- messages from the worker

    def _read(self) -> None:
        try:
            read_frames(self.connection, self._take)
        except (OSError, BadFrame) as error:
            _log.warning("gpu_worker_lost", why=str(error))
        finally:
            self._owning.end()  # `serve` returns
            self._answers.put(None)

    def _take(self, kind: int, number: int, _left_ms: int, payload: bytes) -> None:
        received_ns = int(SYSTEM.perf_s() * 1e9)
        if kind != CALL or not payload:
            raise BadFrame(f"a frame of kind {kind} from a gpu_worker")
        try:
            if payload[0] == ECHO:
                self._send(number, payload)
            elif payload[0] == PLAN:
                self._plan(payload)
            elif payload[0] == PAGES:
                self._store(payload)
            elif payload[0] == ATTEND:
                self._submit(number, payload, received_ns)
            else:
                raise BadFrame(f"a call of kind {payload[0]}")
        except (struct.error, LookupError, ValueError, msgspec.MsgspecError) as error:
            raise BadFrame(f"a call of kind {payload[0]}: {error}") from error

    def _plan(self, payload: bytes) -> None:
        _, slot = PLAN_HEAD.unpack_from(payload)
        arguments = msgspec.msgpack.decode(payload[PLAN_HEAD.size :], type=SlotArguments)
        step = arguments.step(self._layout)
        if slot >= self._layout.slots or slot in self._busy or not self._owning.plan(slot, step):
            raise BadFrame(f"arguments that do not fit slot {slot}, or it is busy")
        self._rows[slot] = len(step.positions)

    def _store(self, payload: bytes) -> None:
        _, group, layer, count = PAGES_HEAD.unpack_from(payload)
        pages = np.frombuffer(payload, np.int32, count, PAGES_HEAD.size)
        data = np.frombuffer(payload, np.uint8, offset=PAGES_HEAD.size + pages.nbytes)
        if pages.min(initial=0) < 0:
            raise BadFrame("a page below the first")
        self._pages[group][pages, layer] = data.reshape(count, self._layout.layer_bytes)

    def _submit(self, number: int, payload: bytes, received_ns: int) -> None:
        _, slot, group, layer = ATTEND_HEAD.unpack_from(payload)
        layout, rows = self._layout, self._rows[slot]
        joined = np.frombuffer(payload, np.uint8, offset=ATTEND_HEAD.size).copy()  # aligned
        fits = layer < layout.groups[group].layers and len(joined) == layout.joined_bytes(rows)
        if slot in self._busy or not fits:
            raise BadFrame(f"{len(joined)} bytes of rows for layer {layer} of group {group}")
        self._busy.add(slot)
        self._owning.submit(slot, group, layer, joined.ctypes.data, 1)
        self._answers.put(_Asked(number, slot, rows, received_ns))

    # -- answers to the worker

    def _answer(self) -> None:
        while (asked := self._answers.get()) is not None:
            out = np.empty(self._layout.out_bytes(asked.rows), np.uint8)
            span = self._owning.wait(asked.slot, out.ctypes.data, NEVER_S)
            if span is None:
                return
            self._busy.discard(asked.slot)
            times = (asked.received_ns, *(int(each * 1e9) for each in (*span, SYSTEM.perf_s())))
            self._send(asked.number, RESULT_HEAD.pack(*times) + out.tobytes())

    def _send(self, number: int, payload: bytes) -> None:
        try:
            with self._sending:
                self.connection.sendall(frame(RESULT, number, payload))
        except OSError:
            self.stop()
