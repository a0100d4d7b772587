"""The append-only log of one shard's writes: every acknowledged write, checksummed and synced.

A segment is a magic line and records of (length, xxh3-64, entry id, encoded Write). A torn or damaged record ends
the log: the rest is cut off, counted, and read again from the stream, which keeps writes until a snapshot.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

from services.vector_search import metrics

EntryId = tuple[int, int]
_MAGIC = b"SPWLOG1\n"
_HEAD = struct.Struct("<IQQQ")
MAX_RECORD_BYTES = 16 * 1024 * 1024


def parse_id(text: str) -> EntryId:
    """Parse an id `ms-seq` to numbers, by which ids compare; ValueError for other text."""
    ms, _, seq = text.partition("-")
    if not (ms.isascii() and ms.isdigit() and (not seq or (seq.isascii() and seq.isdigit()))):
        raise ValueError(f"entry id {text!r}: expected <milliseconds>-<sequence>")
    return int(ms), int(seq or 0)


def format_id(entry: EntryId) -> str:
    """Return `ms-seq`."""
    return f"{entry[0]}-{entry[1]}"


def sync_path(path: Path) -> None:
    """Make a file's bytes, or the names created and removed in a directory, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(length: int, entry: EntryId, payload: bytes) -> int:
    hasher = xxhash.xxh3_64(struct.pack("<IQQ", length, *entry))
    hasher.update(payload)
    return int(hasher.intdigest())


def _scan(data: bytes) -> Iterator[tuple[int, EntryId, bytes]]:
    """Yield (end offset, id, payload) of every sound record from the start; stops at the first that is not."""
    offset = len(_MAGIC)
    if data[:offset] != _MAGIC:
        return
    while offset + _HEAD.size <= len(data):
        length, checksum, ms, seq = _HEAD.unpack_from(data, offset)
        start, end = offset + _HEAD.size, offset + _HEAD.size + length
        if length > MAX_RECORD_BYTES or end > len(data):
            return
        payload = data[start:end]
        if _checksum(length, (ms, seq), payload) != checksum:
            return
        yield end, (ms, seq), payload
        offset = end


class WriteLog:
    """The log in one directory; one writer. Opening it cuts off a damaged tail.

    `append` writes a record, `sync` makes appended records durable, `rollback` takes back unsynced ones.
    OSError passes through (disk full): after it, call `rollback`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.torn = 0
        directory.mkdir(parents=True, exist_ok=True)
        for path in self._segments():
            if self.torn:
                path.unlink()
            else:
                self._cut(path)
        segments = self._segments()
        self._number = int(segments[-1].suffix[1:]) if segments else 0
        self._old_bytes = sum(path.stat().st_size for path in segments[:-1])
        self._fd = -1
        self._size = self._synced = 0
        if segments and segments[-1].stat().st_size >= len(_MAGIC):
            self._fd = os.open(segments[-1], os.O_RDWR | os.O_APPEND)
            self._size = self._synced = segments[-1].stat().st_size

    def _segments(self) -> list[Path]:
        return sorted(self._directory.glob("writes.*"))

    def _cut(self, path: Path) -> None:
        data = path.read_bytes()
        sound = len(_MAGIC) if data[: len(_MAGIC)] == _MAGIC else 0
        for end, _, _ in _scan(data):
            sound = end
        if sound < len(data):
            self.torn += 1
            metrics.TORN_TAILS.inc()
            with path.open("r+b") as file:
                file.truncate(sound)
                os.fsync(file.fileno())

    def entries(self) -> Iterator[tuple[EntryId, bytes]]:
        """Yield (id, encoded Write) of every record, oldest first."""
        for path in self._segments():
            for _, entry, payload in _scan(path.read_bytes()):
                yield entry, payload

    @property
    def size(self) -> int:
        """Bytes in all segments."""
        return self._old_bytes + self._size

    def _open(self) -> None:
        path = self._directory / f"writes.{self._number:010d}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._size = self._synced = 0
        self._write(_MAGIC)
        sync_path(self._directory)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    def append(self, entry: EntryId, payload: bytes) -> None:
        """Write one record; durable after the next `sync`."""
        if self._fd < 0:
            self._open()
        checksum = _checksum(len(payload), entry, payload)
        self._write(_HEAD.pack(len(payload), checksum, *entry) + payload)

    def sync(self) -> None:
        """Return when everything appended is on the disk."""
        if self._fd >= 0 and self._synced < self._size:
            os.fdatasync(self._fd)
            self._synced = self._size

    def rollback(self, size: int | None = None) -> None:
        """Remove the records after `size` bytes of the current segment (default: after the last sync)."""
        size = self._synced if size is None else size
        if self._fd < 0:
            return
        if size < len(_MAGIC):
            os.close(self._fd)
            self._fd, self._size, self._synced = -1, 0, 0
            return
        os.ftruncate(self._fd, size)
        self._size = self._synced = size

    def mark(self) -> int:
        """Return the current segment's length, for `rollback`."""
        return self._size

    def rotate(self) -> list[Path]:
        """Begin a new segment at the next append; return the old ones, for `remove` once a snapshot covers them."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._old_bytes += self._size
            self._fd, self._size, self._synced = -1, 0, 0
            self._number += 1
        return self._segments()

    def remove(self, segments: list[Path]) -> None:
        """Delete segments that a snapshot covers."""
        for path in segments:
            self._old_bytes -= path.stat().st_size
            path.unlink()
        self._old_bytes = max(self._old_bytes, 0)
        sync_path(self._directory)

    def close(self) -> None:
        """Sync and close."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1
