"""Messages between a gpu_worker and a helper on another machine: frames over TCP, and proofs of a shared secret.

The worker sends a nonce. The helper sends its identity, a nonce of its own, and a proof, made from both nonces, that it
knows the secret. The worker sends the same kind of proof, and the layout. The helper confirms that it has allocated
its memory. All later frames are calls of the worker, handled in order: pages, a step's arguments, a layer's rows, and
echoes, which measure the round trip. The helper answers only rows and echoes. Nothing is encrypted: the network
between the two must be private.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.clock import SYSTEM
from common.pages.identity import PAGE
from common.transport.frames import HEAD, HELLO, MAX_PAYLOAD, FrameReader, frame
from engine.host.channel import ChannelLayout, StepTables

VERSION = 1
NONCE_BYTES = 16
_READ_BYTES = 1 << 20  # the most bytes of one read
TIMEOUT_S = 5.0
ECHO, PLAN, PAGES, ATTEND = range(4)
ECHO_HEAD = struct.Struct("<B")
PLAN_HEAD = struct.Struct("<BB")  # slot
# Group, layer and number of pages; the page numbers (int32) and the pages' bytes follow.
PAGES_HEAD = struct.Struct("<BBHI")
ATTEND_HEAD = struct.Struct("<BBBH")  # slot, group, layer: queries, keys and values follow
# Times in nanoseconds: call received, attention began, attention ended, answer sent; the result follows.
RESULT_HEAD = struct.Struct("<qqqq")
_MOST_GREETING = 1 << 16
# A silent disappearance of the other side is noticed within half a minute.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNANSWERED_MS = 30_000
Message = TypeVar("Message", bound=msgspec.Struct)


class TcpChallenge(msgspec.Struct, frozen=True):
    """The gpu_worker's first message."""

    version: int
    nonce: bytes


class TcpHello(msgspec.Struct, frozen=True):
    """The helper's answer to the challenge; `digest` is the hash of its native library."""

    version: int
    digest: str
    nonce: bytes
    proof: bytes


class TcpWelcome(msgspec.Struct, frozen=True):
    """The gpu_worker's answer: the encoded layout, which its proof covers, or the reason of its `refusal`.

    `taken` means that another helper is attached. A later try may succeed, since the worker notices only late that a
    helper's machine has gone.
    """

    layout: bytes = b""
    proof: bytes = b""
    refusal: str = ""
    taken: bool = False


class SlotArguments(msgspec.Struct, frozen=True, array_like=True):
    """A step's arguments, each array as bytes (see `StepTables`)."""

    positions: bytes
    ends: bytes
    tables: list[bytes]
    starts: list[bytes]

    @classmethod
    def of(cls, step: StepTables) -> SlotArguments:
        """Return the message for a step."""
        return cls(
            step.positions.tobytes(), step.ends.tobytes(),
            [each.tobytes() for each in step.tables], [each.tobytes() for each in step.starts],
        )  # fmt: skip

    def step(self, layout: ChannelLayout) -> StepTables:
        """Return the arrays; ValueError if they name rows, groups or pages that the layout does not have."""
        step = StepTables(
            np.frombuffer(self.positions, np.int64), np.frombuffer(self.ends, np.int64),
            [np.frombuffer(each, np.int32) for each in self.tables],
            [np.frombuffer(each, np.int64) for each in self.starts],
        )  # fmt: skip
        counts = np.diff(step.ends, prepend=0)
        sound = (
            len(step.tables) == len(step.starts) == len(layout.groups)
            and len(counts) > 0
            and counts.min() > 0
            and step.ends[-1] == len(step.positions)
            and step.positions.min() >= 0
        )
        if not sound or not all(
            _in_place(step, counts, group, each.pages) for group, each in enumerate(layout.groups)
        ):
            raise ValueError("rows or page tables that the layout has no place for")
        return step


def _in_place(step: StepTables, counts: NDArray[np.int64], group: int, pages: int) -> bool:
    """True if a group's tables name only existing pages (or -1), and every row's own page exists."""
    table, starts = step.tables[group], step.starts[group]
    lengths = np.diff(starts)
    if (
        len(lengths) != len(counts)
        or starts[0] != 0
        or starts[-1] != len(table)
        or lengths.min() < 0
    ):
        return False
    logical = step.positions // PAGE
    if not np.all(logical < np.repeat(lengths, counts)):
        return False
    own = table[np.repeat(starts[:-1], counts) + logical]
    return bool(table.min() >= -1 and table.max() < pages and own.min() >= 0)


def prove(secret: str, side: str, *said: bytes) -> bytes:
    """Return the proof that a side knows the secret, over all that was `said`; each part's length is included."""
    parts = b"".join(len(each).to_bytes(4, "little") + each for each in (side.encode(), *said))
    return hmac.digest(secret.encode(), parts, "sha256")


def proves(proof: bytes, secret: str, side: str, *said: bytes) -> bool:
    """True if a proof was made by a side that knows the secret."""
    return hmac.compare_digest(proof, prove(secret, side, *said))


def tune(connection: socket.socket) -> None:
    """Set TCP options: small messages are sent at once, and a silent disappearance is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def hang_up(connection: socket.socket) -> None:
    """Shut a connection down both ways, and wake the threads that read or write there; any thread may call this."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def read_frames(connection: socket.socket, take: Callable[[int, int, int, bytes], None]) -> None:
    """Pass every frame to `take` until the other side has gone; OSError or BadFrame if the connection breaks."""
    reader = FrameReader(take)
    while data := connection.recv(_READ_BYTES):
        reader.feed(data)


class Greeting:
    """The handshake's frames, sent and received in turn before a channel begins, all within `TIMEOUT_S` seconds.

    OSError if the other side has gone, is too slow, or sends another frame.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._due = connection, SYSTEM.monotonic() + TIMEOUT_S

    def say(self, message: msgspec.Struct) -> None:
        """Send a message of the handshake."""
        self.send(HELLO, msgspec.msgpack.encode(message))

    def hear(self, kind: type[Message]) -> Message:
        """Return the next message of the handshake."""
        found, payload = self.receive(_MOST_GREETING)
        try:
            if found != HELLO:
                raise ConnectionError(f"a frame of kind {found} instead of a greeting")
            return msgspec.msgpack.decode(payload, type=kind)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"no message of a handshake: {error}") from error

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame."""
        self._wait()
        self._connection.sendall(frame(kind, 0, payload))

    def receive(self, most: int = MAX_PAYLOAD) -> tuple[int, bytes]:
        """Return the kind and the payload of the next frame; the payload has at most `most` bytes."""
        length, _, _, kind = HEAD.unpack(self._exactly(HEAD.size))
        if length > most:
            raise ConnectionError(f"a frame of {length} bytes; expected at most {most}")
        return kind, self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._wait()
            data = self._connection.recv(size - len(found))
            if not data:
                raise ConnectionResetError("the other side has gone")
            found += data
        return bytes(found)

    def _wait(self) -> None:
        left_s = self._due - SYSTEM.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer within {TIMEOUT_S:g} s")
        self._connection.settimeout(left_s)
