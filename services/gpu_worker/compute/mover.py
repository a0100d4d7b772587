"""Moves pages between device and host on a thread of its own: loads first, layer by layer, every layer checked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from common import log
from common.ml.decoder.arrival import Arrival
from common.ml.decoder.pool import Pool
from services.gpu_worker.decide.batch import Move

_log = log.get("engine")
_WEIGHT = 0.2  # of the latest copy in the mean seconds of one


class Loading:
    """Loads under way; a step attends to a layer once `arrival` says that its pages have come.

    `unsound` are the loads of pages that are not what was saved; it is complete when all has come.
    """

    def __init__(self, moves: Sequence[Move], arrival: Arrival) -> None:
        self.moves, self.arrival = list(moves), arrival
        self.unsound: set[Move] = set()

    def wait(self) -> None:
        """Return once everything has come."""
        self.arrival.wait_all()


class Mover:
    """Copies between the pools of both tiers; `places` are (group, layer in it) of each of the model's layers.

    A checksum is made of every layer of a page that comes to the host, and compared when it leaves it.
    """

    def __init__(
        self,
        device: Sequence[Pool],
        host: Sequence[Pool],
        places: Sequence[tuple[int, int]],
        arrival: Callable[[], Arrival],
    ) -> None:
        self._device, self._host, self._places, self._arrival = device, host, places, arrival
        self._bytes = [pool.raw() for pool in host]
        self._sums = [
            np.zeros((pool.pages, len(pool.layers)), dtype=np.uint64) for pool in self._host
        ]
        self.moved_bytes = {"load": 0, "save": 0}
        self.moved_s: dict[str, float] = {"load": 0.0, "save": 0.0}
        self.load_s = 0.0  # seconds a page takes to come from the host, a mean of late
        self._cuda = device[0].data.device.type == "cuda" if device else False
        self._stream = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._urgent: deque[Callable[[], None]] = deque()
        self._background: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="mover", daemon=True).start()

    def load(self, moves: Sequence[Move]) -> Loading:
        """Begin to copy pages to the device."""
        loading = Loading(moves, self._arrival())
        self._submit(partial(self._load, loading), urgent=True)
        return loading

    def save(self, move: Move, done: Callable[[Move, bool], object]) -> None:
        """Copy one page to the host when nothing else is to be done.

        `done` is told, on the mover's thread, whether the page is there.
        """
        self._submit(partial(self._save, move, done), urgent=False)

    def fill(
        self, group: int, page: int, layers: Sequence[NDArray[np.uint8]], sums: Sequence[int]
    ) -> None:
        """Write a host page from checked layers, on the calling thread."""
        for at, (layer, checked) in enumerate(zip(layers, sums, strict=True)):
            self._bytes[group][page, at] = layer
            self._sums[group][page, at] = checked

    def read(self, group: int, page: int) -> tuple[NDArray[np.uint8], list[int]]:
        """Return a host page's layers (layers, bytes), the same memory, and what their checksums must be."""
        return self._bytes[group][page], self._sums[group][page].tolist()

    # -- the thread ------------------------------------------------------------------------------------

    def _submit(self, call: Callable[[], None], *, urgent: bool) -> None:
        with self._changed:
            (self._urgent if urgent else self._background).append(call)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._background)
                call = (self._urgent or self._background).popleft()
            with torch.inference_mode():
                try:
                    call()
                except Exception:  # noqa: BLE001 - a copy that failed is computed anew; the thread lives on
                    _log.exception("pages_not_moved")

    def _load(self, loading: Loading) -> None:
        began = time.perf_counter()
        try:
            for layer, (group, at) in enumerate(self._places):
                for move in loading.moves:
                    if move.group == group and not self._copy_in(move, at):
                        loading.unsound.add(move)
                loading.arrival.come(layer + 1, self._event())
        except Exception:
            loading.unsound.update(loading.moves)
            raise
        finally:
            loading.arrival.come(len(self._places))  # whatever happens: nobody waits for ever
        took = time.perf_counter() - began
        self._note("load", loading.moves, took)
        each = took / len(loading.moves)
        self.load_s += (each - self.load_s) * (_WEIGHT if self.load_s else 1.0)

    def _copy_in(self, move: Move, at: int) -> bool:
        """Copy one layer of a page to the device; False if it is not what was saved."""
        source = self._bytes[move.group][move.source, at]
        sound = xxhash.xxh3_64_intdigest(source) == int(self._sums[move.group][move.source, at])
        there, here = self._device[move.group].data, self._host[move.group].data
        with torch.cuda.stream(self._stream):
            there[move.target, at].copy_(here[move.source, at], non_blocking=True)
        return sound

    def _event(self) -> Callable[[], None] | None:
        """Return what makes the device wait for the copies begun so far; None where they are done."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return lambda: torch.cuda.current_stream().wait_event(event)

    def _save(self, move: Move, done: Callable[[Move, bool], object]) -> None:
        began, sound = time.perf_counter(), False
        here, there = self._device[move.group].data, self._host[move.group].data
        try:
            with torch.cuda.stream(self._stream):
                there[move.target].copy_(here[move.source])
            sums = self._sums[move.group][move.target]
            for at, layer in enumerate(self._bytes[move.group][move.target]):
                sums[at] = xxhash.xxh3_64_intdigest(layer)
            self._note("save", [move], time.perf_counter() - began)
            sound = True
        finally:
            done(move, sound)

    def _note(self, kind: str, moves: Sequence[Move], took: float) -> None:
        self.moved_bytes[kind] += sum(self._bytes[move.group][0].nbytes for move in moves)
        self.moved_s[kind] += took
