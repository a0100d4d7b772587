"""Segments: append-only files of pages, found by an index in memory that is built from the records' headers at start.

All calls block; only one thread of one process may make them, and the directory is locked. Only erasing syncs the disk,
since the pages are a cache. After a kill a file's torn end is cut off, and damaged records are skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from errno import EIO
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from common.pages.codec import checksum
from common.pages.identity import Owner
from common.pages.keys import PageKey
from services.kv_store.disk.records import HEAD_BYTES, RecordHeader, decode, read, walk, write

SEGMENTS = 16  # number of files into which the budget is divided
_LEAST_SEGMENT_BYTES = 1 << 16
_COMPACT_BELOW = 0.5


class Share(Struct):
    """One owner's pages: bytes by page, the oldest write first."""

    bytes: int = 0
    pages: dict[PageKey, int] = field(default_factory=dict)


class Owners:
    """Shares by owner; `limits` are the byte limits of some owners."""

    def __init__(self) -> None:
        self.limits: Mapping[Owner, int] = {}
        self._shares: dict[Owner, Share] = {}

    def enter(self, owner: Owner, key: PageKey, size: int) -> None:
        """Add a page of an owner, or replace its size."""
        share = self._shares.setdefault(owner, Share())
        share.bytes += size - share.pages.get(key, 0)
        share.pages[key] = size

    def leave(self, owner: Owner, key: PageKey) -> None:
        """Remove a page of an owner."""
        share = self._shares[owner]
        share.bytes -= share.pages.pop(key)
        if not share.pages:
            del self._shares[owner]

    def excess(self, owner: Owner, size: int) -> list[PageKey]:
        """Return the pages to drop, the oldest first, so that an owner's next page stays within its limit.

        ValueError if the page alone exceeds the limit.
        """
        limit = self.limits.get(owner)
        if limit is None:
            return []
        if size > limit:
            raise ValueError(f"page of {size} bytes; expected at most its owner's {limit}")
        share = self._shares.get(owner, Share())
        return list(_first(share, share.bytes + size - limit))


def _first(share: Share, need: int) -> Iterator[PageKey]:
    for key, size in share.pages.items():
        if need <= 0:
            return
        need -= size
        yield key


class InUse(Exception):
    """The error for a directory that another process has locked."""


class Damaged(Exception):
    """The error for a record whose value was damaged on disk; the record has been erased."""


class Segment(Struct):
    """One file: its number, its descriptor, its size, and the bytes of its records that are not erased."""

    number: int
    fd: int
    size: int = 0
    live: int = 0


class RecordPlace(Struct, frozen=True):
    """A page's place: the file, the byte at which its record begins, and the record's header."""

    segment: Segment
    at: int
    head: RecordHeader


class KeptPage(NamedTuple):
    """A stored page: its value, its expiry (ms), and its owner."""

    value: bytes
    ends_ms: int
    owner: Owner


class Segments:
    """Pages by key in files of at most `budget_bytes`; every call may raise OSError if the disk fails or is full."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory, self._budget = directory, budget_bytes
        self._segment_bytes = max(budget_bytes // SEGMENTS, _LEAST_SEGMENT_BYTES)
        self._segments: dict[int, Segment] = {}
        self._places: dict[PageKey, RecordPlace] = {}
        self.owners = Owners()
        self.skipped = 0  # damaged records and torn ends found at the start
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in sorted(directory.glob("segment." + 10 * "[0-9]")):
                self._load(path)
        except BlockingIOError as error:
            self.close()
            raise InUse(f"{directory} is in use by another process") from error
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._places)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def identity(self) -> str:
        """The directory's own name, stored in a file in it."""
        path = self._directory / "identity"
        with contextlib.suppress(FileNotFoundError):
            if name := path.read_text(encoding="ascii").strip():
                return name
        name = secrets.token_hex(8)
        path.write_text(name, encoding="ascii")
        return name

    def ends(self, keys: Iterable[PageKey] | None = None) -> dict[PageKey, int]:
        """Return the expiry (ms) of all pages, or of the existing ones among `keys`."""
        asked = self._places if keys is None else [key for key in keys if key in self._places]
        return {key: self._places[key].head.ends_ms for key in asked}

    def close(self) -> None:
        """Close the files and unlock the directory."""
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()
        self._places.clear()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    # -- reading ---------------------------------------------------------------------------------------

    def get(self, key: PageKey) -> KeptPage | None:
        """Return a page, or None; if its bytes differ from the written ones, erase it and raise Damaged."""
        place = self._places.get(key)
        if place is None:
            return None
        value = read(place.segment.fd, place.at + HEAD_BYTES, place.head.length)
        if len(value) != place.head.length or checksum(value) != place.head.sum:
            self.erase([key])
            raise Damaged(f"page {key.member} in segment {place.segment.number} at {place.at}")
        return KeptPage(value, place.head.ends_ms, place.head.owner)

    def search(self, keys: Iterable[PageKey]) -> tuple[int, int]:
        """Return the number of records in the index, and how many of them have these keys.

        The index has every record that is not erased; `erase` itself reads back the places that it overwrote.
        """
        return len(self._places), sum(key in self._places for key in keys)

    # -- writing ---------------------------------------------------------------------------------------

    def put(self, key: PageKey, value: bytes, ends_ms: int, owner: Owner = b"") -> list[PageKey]:
        """Store a page, or renew its expiry if it is stored; return the pages that were dropped to make room.

        ValueError if the page is larger than a segment or than its owner's limit.
        """
        if self.renew(key, ends_ms):
            return []
        head = RecordHeader(key, len(value), ends_ms, checksum(value), owner)
        if head.size > min(self._segment_bytes, self._budget - self._segment_bytes):
            raise ValueError(
                f"page of {len(value)} bytes; expected less than a sixteenth of the tier's {self._budget}"
            )
        dropped = self.owners.excess(owner, head.size)
        self.erase(dropped)
        # The size of one segment is reserved for the copies that compaction makes.
        while self.used_bytes + head.size > self._budget - self._segment_bytes and self._segments:
            dropped += self._make_room()
        self._append(head, value)
        return dropped

    def renew(self, key: PageKey, ends_ms: int) -> bool:
        """Set a page's expiry; return whether the page exists."""
        place = self._places.get(key)
        if place is None:
            return False
        head = replace(place.head, ends_ms=ends_ms)
        write(place.segment.fd, place.at, head.encode())
        self._places[key] = RecordPlace(place.segment, place.at, head)
        return True

    def erase(self, keys: Iterable[PageKey], *, sync: bool = False) -> int:
        """Overwrite pages' bytes; return the number of pages.

        With `sync` the bytes are off the disk on return, and each place was read back: OSError if any bytes are left.
        """
        places = [self._places[key] for key in dict.fromkeys(keys) if key in self._places]
        for place in places:
            assert place.head.key is not None
            self._overwrite(place)
            self._forget(place.head.key)
        for segment in {place.segment.number: place.segment for place in places}.values():
            if sync:
                os.fdatasync(segment.fd)
                for place in places:
                    if place.segment is segment:
                        self._check_erased(place)
            self._remove_if_empty(segment)
        return len(places)

    @staticmethod
    def _check_erased(place: RecordPlace) -> None:
        size, number = place.head.size, place.segment.number
        data = read(place.segment.fd, place.at, size)
        head = decode(data[:HEAD_BYTES])
        if head is None or head.key is not None or any(data[HEAD_BYTES:]):
            raise OSError(EIO, f"segment {number} still holds an erased page's bytes at {place.at}")

    def clear(self) -> list[PageKey]:
        """Remove all files; return the pages that they held."""
        for segment in list(self._segments.values()):
            self._remove(segment)
        gone = list(self._places)
        for key in gone:
            self._forget(key)
        return gone

    def expire(self, now_ms: int) -> list[PageKey]:
        """Erase the pages that have expired, and return them."""
        over = [key for key, place in self._places.items() if place.head.ends_ms <= now_ms]
        self.erase(over)
        return over

    def _append(self, head: RecordHeader, value: bytes) -> None:
        segment = self._last()
        if segment is None or (segment.size and segment.size + head.size > self._segment_bytes):
            segment = self._add(segment.number + 1 if segment else 1)
        padding = bytes(head.size - HEAD_BYTES - head.length)
        try:
            write(segment.fd, segment.size, b"".join((head.encode(), value, padding)))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(segment.fd, segment.size)
            raise
        self._enter(segment, segment.size, head)
        segment.size += head.size

    def _enter(self, segment: Segment, at: int, head: RecordHeader) -> None:
        assert head.key is not None
        self._places[head.key] = RecordPlace(segment, at, head)
        self.owners.enter(head.owner, head.key, head.size)
        segment.live += head.size

    def _forget(self, key: PageKey) -> None:
        self.owners.leave(self._places.pop(key).head.owner, key)

    def _overwrite(self, place: RecordPlace) -> None:
        """Zero a record's value, then mark its header as erased: after a kill in between the record is still found."""
        fd, head = place.segment.fd, place.head
        write(fd, place.at + HEAD_BYTES, bytes(head.size - HEAD_BYTES))
        write(fd, place.at, RecordHeader(None, head.length).encode())
        place.segment.live -= head.size

    # -- room ------------------------------------------------------------------------------------------

    def _make_room(self) -> list[PageKey]:
        """Compact the emptiest file if this frees over half of it, else drop a file's pages; return dropped pages."""
        emptiest = min(self._segments.values(), key=lambda s: s.live / s.size if s.size else 0)
        compactable = (
            emptiest is not self._last() and emptiest.live < _COMPACT_BELOW * emptiest.size
        )
        segment, keep = (emptiest, True) if compactable else self._cheapest()
        within = [place for place in self._places.values() if place.segment is segment]
        dropped = []
        for place in within:
            stays = compactable or (keep and place.head.owner in self.owners.limits)
            if not (stays and self._copy(place)):
                assert place.head.key is not None
                self._forget(place.head.key)
                dropped.append(place.head.key)
        self._remove(segment)
        return dropped

    def _cheapest(self) -> tuple[Segment, bool]:
        """Return the file to drop, and whether pages within owners' limits must first be copied out of it.

        The choice is the oldest file at least half of which belongs to other owners, else the file with the most pages
        of other owners, else the oldest file.
        """
        kept: Counter[int] = Counter()
        for place in self._places.values() if self.owners.limits else ():
            if place.head.owner in self.owners.limits:
                kept[place.segment.number] += place.head.size
        older = [self._segments[number] for number in sorted(self._segments)]
        shares = [(kept[s.number] / s.size, s) for s in older[:-1] if s.size]
        half = next((s for share, s in shares if share <= 0.5), None)
        if half is not None:
            return half, True
        share, least = min(shares, key=lambda found: found[0], default=(1.0, older[0]))
        return (least, True) if share < 1 else (older[0], False)

    def _copy(self, place: RecordPlace) -> bool:
        """Append a page again, if it is undamaged and the disk takes it; return whether it was appended."""
        value = read(place.segment.fd, place.at + HEAD_BYTES, place.head.length)
        if checksum(value) != place.head.sum:
            return False
        try:
            self._append(place.head, value)
        except OSError:
            return False
        return True

    def _remove_if_empty(self, segment: Segment) -> None:
        if not segment.live and segment is not self._last():
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        self._path(segment.number).unlink(missing_ok=True)
        os.close(segment.fd)
        del self._segments[segment.number]

    def _last(self) -> Segment | None:
        return self._segments[max(self._segments)] if self._segments else None

    def _path(self, number: int) -> Path:
        return self._directory / f"segment.{number:010d}"

    def _add(self, number: int) -> Segment:
        fd = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o600)
        self._segments[number] = Segment(number, fd)
        return self._segments[number]

    # -- start -----------------------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        segment = self._add(int(path.suffix[1:]))
        size = os.fstat(segment.fd).st_size
        expected = 0
        for at, head in walk(segment.fd, size):
            self.skipped += at != expected
            expected = at + head.size
            if head.key is None:
                continue
            older = self._places.get(head.key)
            if older is not None:  # a kill prevented the older file's removal after a copy
                self._overwrite(older)
                self._forget(head.key)
            self._enter(segment, at, head)
        if expected < size:
            self.skipped += 1
            os.ftruncate(segment.fd, expected)
        segment.size = expected
