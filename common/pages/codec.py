"""The codec of page values, the same for Redis and the disk.

A value is a header of 64 bytes, then for each layer its bytes, in the layout that is part of the pages' fingerprint
(`engine.kernels.page_memory`), and their checksum (xxh3-64). So each layer can be checked and used as soon as it has
arrived. A single damaged layer makes the whole page damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import xxhash
from msgspec import Struct

from common.pages.identity import PageId

HEADER_BYTES = 64
SUM_BYTES = 8
VERSION = 1
MAGIC = b"SWPG"
_HEAD = struct.Struct("<4sHHI16s16sIII")  # the header without its own checksum
_SUM = struct.Struct("<Q")
_HEAD_SUM_AT = HEADER_BYTES - SUM_BYTES
_MOST = (1 << 32) - 1
Buffer: TypeAlias = bytes | bytearray | memoryview


class CorruptPage(Exception):
    """The error for page bytes that differ from the written ones; the message names the fault and its place."""


class Header(Struct, frozen=True, kw_only=True):
    """The header of a page: its id, its parent's id, its place in its chain (from 0), and the layout of its bytes."""

    id: PageId
    parent: PageId
    depth: int
    layers: int
    layer_bytes: int
    group: int = 0

    @property
    def total_bytes(self) -> int:
        """The bytes of the whole value."""
        return HEADER_BYTES + self.layers * (self.layer_bytes + SUM_BYTES)


def checksum(data: Buffer) -> int:
    """Return the xxh3-64 of some bytes."""
    return int(xxhash.xxh3_64_intdigest(data))


def encode(header: Header, layers: Sequence[Buffer], sums: Sequence[int] | None = None) -> bytes:
    """Return a page's value; `sums` are the layers' checksums, if known. The layers are copied once.

    ValueError if the layers do not fit the header.
    """
    if len(layers) != header.layers:
        raise ValueError(f"page has {len(layers)} layers; expected the header's {header.layers}")
    if sums is None:
        sums = [checksum(layer) for layer in layers]
    elif len(sums) != len(layers):
        raise ValueError(
            f"page has {len(sums)} checksums; expected one for each of {len(layers)} layers"
        )
    parts: list[Buffer] = [header_bytes(header)]
    for number, (layer, known) in enumerate(zip(layers, sums, strict=True)):
        size = memoryview(layer).nbytes
        if size != header.layer_bytes:
            raise ValueError(f"layer {number} has {size} bytes; expected {header.layer_bytes}")
        parts += (layer, _SUM.pack(known))
    return b"".join(parts)


def header_bytes(header: Header) -> bytes:
    """Return the first 64 bytes of a page's value; ValueError if a field is too large for them."""
    if len(header.id) != 16 or len(header.parent) != 16:
        raise ValueError(f"page id {header.id!r}, parent {header.parent!r}; expected 16 bytes each")
    numbers = (header.group, header.depth, header.layers, header.layer_bytes)
    if not all(0 <= number <= _MOST for number in numbers):
        raise ValueError(f"page header {numbers}: expected numbers from 0 to {_MOST}")
    group, depth, layers, layer_bytes = numbers
    head = _HEAD.pack(
        MAGIC, VERSION, 0, group, header.id, header.parent, depth, layers, layer_bytes
    )
    return head + _SUM.pack(checksum(head))


def read_header(data: Buffer, expected: PageId | None = None) -> Header:
    """Return the header of a possibly incomplete value; CorruptPage if it is damaged, or not the `expected` page's."""
    if len(data) < HEADER_BYTES:
        raise CorruptPage(f"page of {len(data)} bytes: expected a header of {HEADER_BYTES}")
    head = memoryview(data)[:_HEAD_SUM_AT]
    (known,) = _SUM.unpack_from(data, _HEAD_SUM_AT)
    if checksum(head) != known:
        raise CorruptPage("page header: its checksum is wrong")
    magic, version, _, group, own, parent, depth, layers, layer_bytes = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise CorruptPage(
            f"page header: {magic!r} version {version}; expected {MAGIC!r} version {VERSION}"
        )
    if expected is not None and own != expected:
        raise CorruptPage(f"page header: id {own.hex()}; expected {expected.hex()}")
    return Header(
        id=own, parent=parent, depth=depth, layers=layers, layer_bytes=layer_bytes, group=group
    )


def layer(data: Buffer, header: Header, number: int) -> memoryview:
    """Check one layer and return a view of its bytes; CorruptPage if they are incomplete or damaged."""
    start = HEADER_BYTES + number * (header.layer_bytes + SUM_BYTES)
    end = start + header.layer_bytes
    if not 0 <= number < header.layers or end + SUM_BYTES > len(data):
        raise CorruptPage(
            f"page of {len(data)} bytes: layer {number} of {header.layers} is not there"
        )
    found = memoryview(data)[start:end]
    (known,) = _SUM.unpack_from(data, end)
    if checksum(found) != known:
        raise CorruptPage(f"layer {number} at byte {start}: its checksum is wrong")
    return found


def layers(data: Buffer, expected: PageId | None = None) -> list[memoryview]:
    """Return views of the bytes of all layers, unchecked (see `check`); CorruptPage for a wrong header or length.

    The views keep the whole value in memory.
    """
    header = _whole(data, expected)
    view, step = memoryview(data), header.layer_bytes + SUM_BYTES
    starts = range(HEADER_BYTES, HEADER_BYTES + header.layers * step, step)
    return [view[start : start + header.layer_bytes] for start in starts]


def check(data: Buffer, expected: PageId | None = None) -> list[int]:
    """Return the layers whose bytes are damaged, none for a sound page; CorruptPage for a wrong header or length."""
    header = _whole(data, expected)
    bad = []
    for number in range(header.layers):
        try:
            layer(data, header, number)
        except CorruptPage:
            bad.append(number)
    return bad


def _whole(data: Buffer, expected: PageId | None) -> Header:
    header = read_header(data, expected)
    if len(data) != header.total_bytes:
        raise CorruptPage(f"page of {len(data)} bytes: expected {header.total_bytes} by its header")
    return header
