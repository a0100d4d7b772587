"""The page copier: copies pages between device and host on its own thread, loads first, layer by layer, checked."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import log
from common.clock import SYSTEM
from common.pages.codec import Buffer, CorruptPage, Header, checksum, encode, layer, read_header
from common.pages.keys import PageKey
from engine.decoder.executor.interface import LocalTier, PageMove
from engine.kernels.checksums import checksums
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory, copy_pages, pack

_log = log.get("engine")
# Priorities of tasks: copies to the device, copies to the host, and work for the tiers below.
KINDS = ("load", "save", "get", "put")
T = TypeVar("T")
_WEIGHT = 0.2  # weight of the latest copy in the mean seconds of a copy
_CACHED = 8  # pages that are copied, then compared: so many stay in the processor's cache
_THREADS = 4  # that make checksums where the CPU does not compute steps


_MOST = 127.0
_SCALE_BYTES = 4


class Int8Form:
    """The int8 form of a page's layer: scales of its rows of `dim` numbers, then their 8-bit values."""

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        self._dtype, self._dim = dtype, dim

    def size(self, plain_bytes: int) -> int:
        """Return the bytes of a layer in this form."""
        numbers = plain_bytes // self._dtype.itemsize
        return numbers + numbers // self._dim * _SCALE_BYTES

    def shrink(self, layer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a layer's bytes in this form."""
        rows = torch.from_numpy(layer).view(self._dtype).view(-1, self._dim).float()
        scales = (rows.abs().amax(dim=1, keepdim=True) / _MOST).clamp_min(1e-30)
        small = (rows / scales).round().to(torch.int8)
        return np.concatenate([_bytes(scales), _bytes(small)])

    def grow(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the bytes of a layer; each number's error is at most half its scale, plus rounding to its type."""
        count = len(data) // (self._dim + _SCALE_BYTES)
        whole = torch.from_numpy(data.copy())
        scales = whole[: count * _SCALE_BYTES].view(torch.float32).view(-1, 1)
        rows = whole[count * _SCALE_BYTES :].view(torch.int8).view(-1, self._dim).float() * scales
        return _bytes(rows.to(self._dtype))


def _bytes(values: Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = values.contiguous().view(torch.uint8).reshape(-1).numpy()
    return found


class TorchPageLoads:
    """Page loads in progress; a step attends to a layer once `arrival` has counted the layer.

    `unsound` are the loads whose bytes differ from the saved bytes; the set is complete once all pages have arrived.
    """

    def __init__(self, moves: Sequence[PageMove], arrival: PageArrival) -> None:
        self.moves, self.arrival = list(moves), arrival
        self.unsound: set[PageMove] = set()

    def wait(self) -> None:
        """Return once all pages have arrived."""
        self.arrival.wait_all()


class TorchPageCopier:
    """Copies pages between the pools of device and host; `places` are (group, layer in it) of each model layer.

    Pages in tiers below the host always have the packed layout. Each layer of a page that is copied to the host gets a
    checksum, which is compared when the page leaves the host.
    """

    def __init__(
        self,
        device: Sequence[PageMemory],
        host: Sequence[PageMemory],
        places: Sequence[tuple[int, int]],
        arrival: Callable[[], PageArrival],
        form: Int8Form | None = None,
    ) -> None:
        """`form` encodes pages for the tiers below the host; None: pages are stored unchanged."""
        self._form = form
        self._device, self._host, self._places, self._arrival = device, host, places, arrival
        self._bytes = [pool.raw() for pool in host]
        self._sums = [
            np.zeros((pool.pages, len(pool.layers)), dtype=np.uint64) for pool in self._host
        ]
        self.moved_bytes = dict.fromkeys(KINDS, 0)
        self.moved_s = dict.fromkeys(KINDS, 0.0)
        self.load_s = 0.0  # recent mean seconds to load a page from the host
        self._cuda = device[0].data.device.type == "cuda" if device else False
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._urgent: deque[Callable[[], None]] = deque()
        self._background: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="page-copier", daemon=True).start()

    def load(self, moves: Sequence[PageMove]) -> TorchPageLoads:
        """Begin to copy pages to the device."""
        loading = TorchPageLoads(moves, self._arrival())
        self._submit(partial(self._load, loading), urgent=True)
        return loading

    def save(self, move: PageMove, done: Callable[[PageMove, bool], object]) -> None:
        """Copy one page to the host when there are no loads.

        `done` is called on the copier's thread with the move and whether it succeeded.
        """
        self._submit(partial(self._save, move, done), urgent=False)

    def close(self) -> None:
        """Let the copier's thread end once it has done what it was given: the thread refers to all pages."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def written(self, pages: Sequence[tuple[int, int]]) -> None:
        """Make the checksums of (group, page) of host pages that steps have written, before any later task."""
        if pages:
            self._submit(partial(self._sum, pages), urgent=True)

    def layout(self, group: int) -> tuple[int, int]:
        """Return the number of layers of a group's page, and the bytes of one layer."""
        _, layers, size = self._bytes[group].shape
        return layers, size if self._form is None else self._form.size(size)

    async def value(self, header: Header, tier: LocalTier, page: int) -> bytes:
        """Return the bytes of a held page in the form of the tiers below the host."""
        return await self._later(partial(self._value, header, tier, page))

    async def fill(self, pages: Sequence[tuple[PageKey, int, Buffer]]) -> dict[PageKey, str]:
        """Write values from a lower tier to host pages; return the errors of damaged values."""
        return await self._later(partial(self._fill, pages))

    async def _later(self, call: Callable[[], T]) -> T:
        """Run `call` on the copier's thread once it has no more urgent task; return its result, or raise its error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                found = call()
            except Exception as error:  # noqa: BLE001 - the error is raised in the caller
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_end, future, found)

        self._submit(run, urgent=False)
        return await asyncio.shield(future)

    def _value(self, header: Header, tier: LocalTier, page: int) -> bytes:
        began = SYSTEM.perf_s()
        pool = (self._host if tier == "host" else self._device)[header.group]
        held = pool.form(pool.data[page].cpu()).view(torch.uint8)
        layers = list(held.reshape(header.layers, -1).numpy())
        if self._form is not None:
            layers = [self._form.shrink(layer) for layer in layers]
        sums: list[int] | None = None
        if tier == "host":
            sums = self._sums[header.group][page].tolist()
            if self._form is not None or not pool.packed:
                # If the host's memory was damaged, the checksum of the converted layer must be wrong, too.
                plain = self._bytes[header.group][page]
                sums = [
                    checksum(now.data) ^ checksum(was.data) ^ known
                    for now, was, known in zip(layers, plain, sums, strict=True)
                ]
        found = encode(header, layers, sums)
        self._count("put", len(found), SYSTEM.perf_s() - began)
        return found

    def _fill(self, pages: Sequence[tuple[PageKey, int, Buffer]]) -> dict[PageKey, str]:
        wrong = {}
        for key, page, value in pages:
            began = SYSTEM.perf_s()
            try:
                self._fill_page(key, page, value)
            except CorruptPage as error:
                wrong[key] = str(error)
            self._count("get", len(value), SYSTEM.perf_s() - began)
        return wrong

    def _fill_page(self, key: PageKey, page: int, value: Buffer) -> None:
        header = read_header(value, key.id)
        if (header.layers, header.layer_bytes) != self.layout(key.group):
            raise CorruptPage(f"page {key.member}: {header.layers} layers of {header.layer_bytes}")
        pool = self._host[key.group]
        for at in range(header.layers):
            found = np.frombuffer(layer(value, header, at), dtype=np.uint8)
            found = found if self._form is None else self._form.grow(found)
            if pool.packed:
                self._bytes[key.group][page, at] = found
                pool.written([page], at)
            else:
                whole = torch.from_numpy(found.copy()).view(pool.data.dtype)
                pool.store(page, at, whole.view(pool.data.shape[2:]))
            self._sums[key.group][page, at] = checksum(self._bytes[key.group][page, at].data)

    # -- the thread ------------------------------------------------------------------------------------

    def _submit(self, call: Callable[[], None], *, urgent: bool) -> None:
        with self._changed:
            (self._urgent if urgent else self._background).append(call)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._background or self._closed)
                if not (self._urgent or self._background):
                    return
                call = (self._urgent or self._background).popleft()
            with torch.inference_mode():
                try:
                    call()
                except Exception:  # noqa: BLE001 - pages of a failed copy are computed; the thread lives on
                    _log.exception("pages_not_moved")

    def _load(self, loading: TorchPageLoads) -> None:
        began = SYSTEM.perf_s()
        try:
            moves = [
                [each for each in loading.moves if each.group == group]
                for group in range(len(self._host))
            ]
            for layer, (group, at) in enumerate(self._places):
                with torch.cuda.stream(self._stream):
                    loading.unsound.update(self._copy_in(group, moves[group], at))
                loading.arrival.ready(layer + 1, self._event())
        except Exception:
            loading.unsound.update(loading.moves)
            raise
        finally:
            # Also after an error, so that no step waits forever.
            loading.arrival.ready(len(self._places))
        took = SYSTEM.perf_s() - began
        self._note("load", loading.moves, took)
        each = took / len(loading.moves)
        self.load_s += (each - self.load_s) * (_WEIGHT if self.load_s else 1.0)

    def _copy_in(self, group: int, moves: Sequence[PageMove], at: int) -> list[PageMove]:
        """Copy one layer of pages to the device; zero those whose bytes differ from the saved ones, and return them.

        Damaged bytes could contain NaN, which would fail the step before the damage is known, and stay in the page.
        """
        there, here = self._device[group], self._host[group]
        unsound, step = [], max(1, len(moves)) if self._cuda else _CACHED
        for first in range(0, len(moves), step):
            some = moves[first : first + step]
            sources, targets = [move.source for move in some], [move.target for move in some]
            copy_pages(
                here, sources, at, there, targets, at
            )  # a device copies while this thread compares
            sound = self._checksums(group, np.array(sources), at) == self._sums[group][sources, at]
            unsound += [move for move, whole in zip(some, sound.tolist(), strict=True) if not whole]
        for move in unsound:
            there.data[move.target, at].zero_()
        return unsound

    def _checksums(
        self, group: int, pages: NDArray[np.int64] | int, layers: NDArray[np.int64] | int
    ) -> NDArray[np.uint64]:
        """Return the checksums of one layer of host pages, or of the layers of one page."""
        held = self._bytes[group]
        offsets = np.asarray(pages * held.strides[0] + layers * held.strides[1])
        return checksums(held, offsets, held.shape[2], _THREADS if self._cuda else 1)

    def _event(self) -> Callable[[], None] | None:
        """Return a function that makes the device wait for the copies started so far; None if they are done."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return lambda: torch.cuda.current_stream().wait_event(event)

    def _save(self, move: PageMove, done: Callable[[PageMove, bool], object]) -> None:
        began, sound = SYSTEM.perf_s(), False
        here, there = self._device[move.group], self._host[move.group]
        try:
            with torch.cuda.stream(self._stream):
                page = here.data[move.source]
                there.data[move.target].copy_(page if here.packed == there.packed else pack(page))
            there.written([move.target])
            self._sum([(move.group, move.target)])
            self._note("save", [move], SYSTEM.perf_s() - began)
            sound = True
        finally:
            done(move, sound)

    def _sum(self, pages: Sequence[tuple[int, int]]) -> None:
        for group, page in pages:
            layers = np.arange(len(self._host[group].layers))
            self._sums[group][page] = self._checksums(group, page, layers)

    def _note(self, kind: str, moves: Sequence[PageMove], took: float) -> None:
        self._count(kind, sum(self._bytes[move.group][0].nbytes for move in moves), took)

    def _count(self, kind: str, size: int, took: float) -> None:
        self.moved_bytes[kind] += size
        self.moved_s[kind] += took


def _end(future: asyncio.Future[T], found: T) -> None:
    if not future.done():
        future.set_result(found)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
