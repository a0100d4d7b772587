"""Attention channels: how a gpu_worker hands attention to a helper, as an interface, and by shared memory.

The channel in shared memory calls `host_channel.cpp`. This module loads no torch, since a helper needs none.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from common.native.finder import open_first
from engine.kernels.sources import HOST_CHANNEL

_int64 = ctypes.c_int64


class GroupLayout(msgspec.Struct, frozen=True):
    """A layer group in the segment of pages: offset of its first page, pages, layers of a page, window (0: none)."""

    offset: int
    pages: int
    layers: int
    window: int


class ChannelLayout(msgspec.Struct, frozen=True):
    """The shapes of pages and slots of one attachment.

    A slot holds `rows` decoding rows, and page tables of `entries` pages of each layer group. Scores are multiplied by
    `scale` and bounded by `cap` (0: unbounded); `kind` is the kernels' number for the pages' data type. `epoch` is the
    number of the attachment.
    """

    epoch: int
    slots: int
    rows: int
    entries: int
    heads: int
    kv_heads: int
    dim: int
    scale: float
    cap: float
    kind: int
    groups: list[GroupLayout]
    page_bytes: int  # bytes of the whole segment of pages
    layer_bytes: int  # bytes of one layer of a page

    def joined_bytes(self, rows: int) -> int:
        """Return the bytes of the fp32 queries, keys and values of `rows` rows."""
        return 4 * rows * (self.heads + 2 * self.kv_heads) * self.dim

    def out_bytes(self, rows: int) -> int:
        """Return the bytes of the fp32 attention results of `rows` rows."""
        return 4 * rows * self.heads * self.dim


class ChannelLibrary(NamedTuple):
    """The native library, and the hash of its bytes: two processes may share memory only if their hashes are equal."""

    functions: ctypes.CDLL
    digest: str

    def slot_bytes(self, layout: ChannelLayout) -> int:
        """Return the bytes of memory that the layout's slots take."""
        shape = _shape(layout)
        found: int = self.functions.spillway_channel_bytes(ctypes.byref(shape))
        return found

    def against(self, digest: str) -> str:
        """Return why a process with a library of this digest cannot compute the same bits; empty if it can."""
        if digest == self.digest:
            return ""
        return f"its native library is {digest}, this worker's is {self.digest}; expected the same build on both sides"


class StepTables(NamedTuple):
    """One step's rows as a slot stores them: positions (rows,), each sequence's end, and each group's page tables.

    `tables` are int32, the other arrays int64. `starts[group]` says where each sequence's table begins. With `fronts`
    (sequences,) the helper attends to so many first pages of each sequence only, and nothing is appended to pages.
    """

    positions: np.ndarray
    ends: np.ndarray
    tables: Sequence[np.ndarray]
    starts: Sequence[np.ndarray]
    fronts: np.ndarray | None = None


class AttentionChannel(Protocol):
    """The gpu_worker's side of one attachment; only the compute thread calls the methods, except `end`."""

    layout: ChannelLayout

    def ready(self) -> bool:
        """True while the helper works on no abandoned call, and all messages have been sent."""

    def plan(self, slot: int, step: StepTables) -> bool:
        """Hand a step's arguments to the helper; False if they do not fit, or the helper cannot take a step now."""

    def submit(self, slot: int, group: int, layer: int, joined: int, threads: int) -> None:
        """Append keys and values to the pages, with `threads` threads, and hand a layer's queries to the helper.

        `joined` is the address of fp32 (rows, heads + 2 * kv heads, dim).
        """

    def wait(self, slot: int, out: int, patience_s: float) -> tuple[float, float] | None:
        """Wait up to `patience_s` for the submitted layer; return when its attention began and ended (s since boot).

        The result, fp32 (rows, heads, dim), is then at the address `out`; of fronts these are sums, and the largest
        scores and the sums of weights follow, (rows, heads) each. None: the helper was too slow or has gone.
        """

    def missed(self, step: StepTables) -> None:
        """Record that this process appends a step's keys and values without the helper's knowledge."""

    def end(self) -> None:
        """Hand no more work to the helper, and wake all waiting threads; any thread may call this."""


class HostChannel:
    """One side of one attachment in shared memory; keeps a reference to the memory of slots and pages."""

    def __init__(
        self,
        library: ChannelLibrary,
        layout: ChannelLayout,
        slots: mmap.mmap,
        pages: mmap.mmap,
        *,
        owner: bool,
    ) -> None:
        """Open the channel: the `owner` brings slots of zeros, the other side maps the owner's slots."""
        self.layout = layout
        self._native = library.functions
        self._memory = [np.frombuffer(memory, dtype=np.uint8) for memory in (slots, pages)]
        shape = _shape(layout)
        groups = (_Group * len(layout.groups))(
            *(_Group(each.offset, each.layers, each.window) for each in layout.groups)
        )
        self._channel = ctypes.c_void_p(
            self._native.spillway_channel(
                *(ctypes.c_void_p(memory.ctypes.data) for memory in self._memory),
                ctypes.byref(shape),
                groups,
                int(owner),
            )
        )
        weakref.finalize(self, self._native.spillway_channel_free, self._channel)

    @property
    def epoch(self) -> int:
        """The number of the attachment, read from the slots."""
        found: int = self._native.spillway_channel_epoch(self._channel)
        return found

    # -- the owner of the pages, on its compute thread

    def ready(self) -> bool:
        """True while the helper works on no abandoned call."""
        return bool(self._native.spillway_channel_ready(self._channel))

    def plan(self, slot: int, step: StepTables) -> bool:
        """Write a step's arguments into a slot; False if they do not fit, or the helper holds the slot."""
        groups = len(step.tables)
        pointers = ctypes.c_void_p * groups
        return bool(
            self._native.spillway_channel_plan(
                self._channel,
                _int64(slot),
                _int64(len(step.positions)),
                _at(step.positions),
                _int64(len(step.ends)),
                _at(step.ends),
                pointers(*(each.ctypes.data for each in step.tables)),
                pointers(*(each.ctypes.data for each in step.starts)),
                None if step.fronts is None else _at(step.fronts),
            )
        )

    def submit(self, slot: int, group: int, layer: int, joined: int, threads: int) -> None:
        """Append keys and values to the pages, with `threads` threads, and hand a layer's queries to the helper.

        `joined` is the address of fp32 (rows, heads + 2 * kv heads, dim).
        """
        self._native.spillway_channel_submit(
            self._channel, _int64(slot), _int64(group), _int64(layer), ctypes.c_void_p(joined), threads
        )  # fmt: skip

    def append(self, slot: int, group: int, layer: int, joined: int, threads: int) -> None:
        """Append keys and values to the pages as `submit` does, without handing queries to the helper."""
        self._native.spillway_channel_append(
            self._channel, _int64(slot), _int64(group), _int64(layer), ctypes.c_void_p(joined), threads
        )  # fmt: skip

    def missed(self, step: StepTables) -> None:
        """Do nothing: both sides have the same pages."""

    def wait(self, slot: int, out: int, patience_s: float) -> tuple[float, float] | None:
        """Wait up to `patience_s` for the submitted layer; return when its attention began and ended (s since boot).

        The result is then at the address `out` (see `AttentionChannel`). None: the helper was too slow or has gone.
        """
        span = (ctypes.c_int64 * 2)()
        done = self._native.spillway_channel_wait(
            self._channel, _int64(slot), _int64(int(patience_s * 1e9)), ctypes.c_void_p(out), span
        )
        return (span[0] / 1e9, span[1] / 1e9) if done else None

    def end(self) -> None:
        """Hand no more work to the helper, and wake all waiting threads; any thread may call this."""
        self._native.spillway_channel_end(self._channel)

    # -- the helper

    def serve(self, threads: int, slowdown: int = 1) -> int:
        """Attend until the owner ends the channel or `stop`; return how many layers were done in time."""
        found: int = self._native.spillway_channel_serve(self._channel, threads, slowdown)
        return found

    def stop(self) -> None:
        """Make `serve` return after the layer that it is computing; any thread may call this."""
        self._native.spillway_channel_stop(self._channel)


def load_channel() -> ChannelLibrary | None:
    """Return the library for this processor, or None if it cannot be built or loaded."""
    functions = open_first(HOST_CHANNEL)
    if functions is None:
        return None
    functions.spillway_channel.restype = ctypes.c_void_p
    for name in ("bytes", "epoch", "serve"):
        getattr(functions, f"spillway_channel_{name}").restype = _int64
    digest = hashlib.blake2b(Path(functions._name).read_bytes(), digest_size=16).hexdigest()
    return ChannelLibrary(functions, digest)


class _Heads(ctypes.Structure):
    """The heads' sizes and factors, laid out as the struct in `attention.h`."""

    _fields_ = (
        *((name, _int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class _Shape(ctypes.Structure):
    """A channel's shape, laid out as the struct in `host_channel.cpp`."""

    _fields_ = (
        ("heads", _Heads),
        *((name, _int64) for name in ("epoch", "slots", "rows", "entries", "kind", "groups")),
    )


class _Group(ctypes.Structure):
    """A layer group's pages, laid out as the struct in `host_channel.cpp`."""

    _fields_ = tuple((name, _int64) for name in ("offset", "layers", "window"))


def _shape(layout: ChannelLayout) -> _Shape:
    heads = _Heads(layout.heads, layout.kv_heads, layout.dim, layout.scale, layout.cap)
    return _Shape(
        heads, layout.epoch, layout.slots, layout.rows, layout.entries, layout.kind,
        len(layout.groups),
    )  # fmt: skip


def _at(values: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)
