"""The records of a segment file: a header of 64 bytes, then the page's value, padded to a multiple of 64 bytes.

A header never straddles two disk sectors, so it can be rewritten in place as a whole: with another expiry, or as the
header of an erased record, after the value has been overwritten.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from msgspec import Struct

from common.pages.codec import checksum
from common.pages.identity import Owner
from common.pages.keys import PageKey

HEAD_BYTES = 64
_MAGIC = b"SWPR"
_LIVE, _ERASED = 1, 0
_HEAD = struct.Struct("<4sB3xIIQQ16s8s")
_SUM = struct.Struct("<Q")
_MOST = (1 << 32) - 1
_READ_BYTES = 1 << 20


class RecordHeader(Struct, frozen=True):
    """The header of a record: the page's key, the value's length in bytes, its expiry (ms), and the value's xxh3-64.

    An erased record has no key; a page without a tenant has no owner.
    """

    key: PageKey | None
    length: int
    ends_ms: int = 0
    sum: int = 0
    owner: Owner = b""

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return size_of(self.length)

    def encode(self) -> bytes:
        """Return the 64 bytes."""
        state, (page, group) = (_LIVE, self.key) if self.key else (_ERASED, (bytes(16), 0))
        ends_ms = min(self.ends_ms, (1 << 63) - 1)
        head = _HEAD.pack(_MAGIC, state, group, self.length, ends_ms, self.sum, page, self.owner)
        return head + _SUM.pack(checksum(head))


def size_of(length: int) -> int:
    """Return the size of the record for a value of `length` bytes; ValueError if the value is too long."""
    if length > _MOST:
        raise ValueError(f"value of {length} bytes; expected at most {_MOST}")
    return HEAD_BYTES + -(-length // HEAD_BYTES) * HEAD_BYTES


def decode(data: bytes) -> RecordHeader | None:
    """Decode 64 bytes as a header; None if they are not a header."""
    if len(data) < HEAD_BYTES or data[:4] != _MAGIC:
        return None
    (known,) = _SUM.unpack_from(data, HEAD_BYTES - _SUM.size)
    if checksum(data[: HEAD_BYTES - _SUM.size]) != known:
        return None
    _, state, group, length, ends_ms, total, page, owner = _HEAD.unpack_from(data)
    key = PageKey(page, group) if state == _LIVE else None
    return RecordHeader(key, length, ends_ms, total, owner if any(owner) else b"")


def find(data: bytes, start: int) -> int:
    """Return the offset of the next header in these bytes, at a multiple of 64 from `start` on; -1 if there is none."""
    at = data.find(_MAGIC, start)
    while at >= 0:
        if at % HEAD_BYTES == 0 and decode(data[at : at + HEAD_BYTES]):
            return at
        at = data.find(_MAGIC, at + 1)
    return -1


def walk(fd: int, size: int) -> Iterator[tuple[int, RecordHeader]]:
    """Yield the offset and the header of each record of a file; skip damaged bytes and a torn end.

    This and the functions below raise OSError if the disk fails.
    """
    at = 0
    while at + HEAD_BYTES <= size:
        head = decode(os.pread(fd, HEAD_BYTES, at))
        if head is None or at + head.size > size:
            at = _next(fd, at + HEAD_BYTES, size)
            continue
        yield at, head
        at += head.size


def _next(fd: int, at: int, size: int) -> int:
    """Return the offset of a file's next header, or the file's size if there is none."""
    while at < size:
        found = find(os.pread(fd, _READ_BYTES, at), 0)
        if found >= 0:
            return at + found
        at += _READ_BYTES
    return size


def read(fd: int, at: int, length: int) -> bytes:
    """Return `length` bytes of a file from `at` on, fewer at its end."""
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            break
        data += more
    return data


def write(fd: int, at: int, data: bytes) -> None:
    """Write all bytes at an offset of a file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
