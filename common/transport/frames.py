"""Frames: the bytes of calls between two processes over TCP, many at once on one connection.

A frame is a head of 13 bytes (length of the payload, number of the call, milliseconds left, kind, all little-endian)
and a payload. A caller begins with a HELLO frame that holds the token of the process that it wants to reach. The server
answers with a HELLO frame, or closes the connection if the token is another one's: an address may have passed to
another process since it was published.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from common import log

HEAD = struct.Struct("<IIIB")
MAX_PAYLOAD = 9 * 1024 * 1024  # an encoded message, with the fields of an error
MAX_HELLO = 64
HELLO, CALL, RESULT, ERROR = range(4)
_log = log.get("transport")


class BadFrame(ValueError):
    """Bytes that are no valid frame."""


def frame(kind: int, call: int, payload: bytes, left_ms: int = 0) -> bytes:
    """Return the bytes of one frame; ValueError for a payload that is too large."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"a payload of {len(payload)} bytes: at most {MAX_PAYLOAD} fit into a frame"
        )
    return HEAD.pack(len(payload), call, left_ms, kind) + payload


class FrameReader:
    """Cuts a stream of bytes into frames, and hands each to `take(kind, call, left_ms, payload)`.

    A payload may have up to `most` bytes: few in the hello of an unknown caller, so that it cannot fill the memory.
    """

    def __init__(
        self, take: Callable[[int, int, int, bytes], None], most: int = MAX_PAYLOAD
    ) -> None:
        self.most = most
        self._take = take
        self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        """Read the next bytes; BadFrame if they cannot be a frame."""
        stream: bytes | bytearray = data
        if self._kept:
            self._kept += data
            stream = self._kept
        at, size = 0, len(stream)
        while size - at >= HEAD.size:
            length, call, left_ms, kind = HEAD.unpack_from(stream, at)
            if length > self.most or kind > ERROR:
                raise BadFrame(f"a frame of kind {kind} and {length} bytes")
            end = at + HEAD.size + length
            if end > size:
                break
            payload = bytes(memoryview(stream)[at + HEAD.size : end])
            at = end
            self._take(kind, call, left_ms, payload)
        if stream is not data:
            del self._kept[:at]
        elif at < size:
            self._kept += memoryview(data)[at:]

    def feed_from(self, transport: asyncio.Transport | None, data: bytes) -> None:
        """Read the next bytes of a connection, and end the connection if they cannot be a frame."""
        try:
            self.feed(data)
        except BadFrame as error:
            _log.warning("bad_frame", why=str(error))
            if transport is not None:
                transport.abort()
