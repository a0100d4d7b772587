"""Files of records: their headers one after the other, and bytes at a place, whole. OSError where the disk fails."""

from __future__ import annotations

import os
from collections.abc import Iterator

from services.kv_store.records import HEAD_BYTES, RecordHeader, decode, find

_READ_BYTES = 1 << 20


def walk(fd: int, size: int) -> Iterator[tuple[int, RecordHeader]]:
    """Yield where each record of a file begins, and its header; what is damaged is skipped, a torn end left out."""
    at = 0
    while at + HEAD_BYTES <= size:
        head = decode(os.pread(fd, HEAD_BYTES, at))
        if head is None or at + head.size > size:
            at = _next(fd, at + HEAD_BYTES, size)
            continue
        yield at, head
        at += head.size


def _next(fd: int, at: int, size: int) -> int:
    """Return where the next header of a file begins, or its size if there is none."""
    while at < size:
        found = find(os.pread(fd, _READ_BYTES, at), 0)
        if found >= 0:
            return at + found
        at += _READ_BYTES
    return size


def read(fd: int, at: int, length: int) -> bytes:
    """Return `length` bytes of a file from `at` on, or what there is of them."""
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            break
        data += more
    return data


def write(fd: int, at: int, data: bytes) -> None:
    """Write all of some bytes at a place."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
