"""The clock of a step's stages: CUDA stages are timed by events in the device's queue, all others while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from common.clock import SYSTEM
from engine.decoder.executor.interface import StageName, StageTime

T = TypeVar("T")


class _Queued(NamedTuple):
    stage: StageName
    part: int
    layer: int
    begin: Any
    end: Any


class StageClock:
    """Times the stages of one step after another; one thread calls it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._times: list[StageTime] = []
        self._queued: list[_Queued] = []
        self._origin: Any = None
        self._origin_s = 0.0

    def restart(self) -> None:
        """Begin a step: forget the stages of the previous step, which is over."""
        self._times, self._queued = [], []
        if self._cuda:
            self._origin = self._event()
            self._origin.synchronize()
            self._origin_s = SYSTEM.perf_s()

    def timed(self, stage: StageName, part: int, layer: int, call: Callable[[], T]) -> T:
        """Call a function that computes a stage, or queues it on the device; time the stage, and return its result."""
        if self._cuda:
            begin = self._event()
            found = call()
            self._queued.append(_Queued(stage, part, layer, begin, self._event()))
            return found
        began = SYSTEM.perf_s()
        found = call()
        self.note(StageTime(stage, part, layer, began, SYSTEM.perf_s()))
        return found

    def note(self, time: StageTime) -> None:
        """Add a stage that was timed where it ran."""
        self._times.append(time)

    @property
    def times(self) -> list[StageTime]:
        """The stages of the step, in the order of their ends; on CUDA this waits until the device has ended them.

        A device stage begins when the device reaches it, and includes the waits for its data.
        """
        for queued in self._queued:
            queued.end.synchronize()
            begin_s, end_s = (
                self._origin_s + self._origin.elapsed_time(event) / 1e3
                for event in (queued.begin, queued.end)
            )
            self._times.append(StageTime(queued.stage, queued.part, queued.layer, begin_s, end_s))
        self._queued = []
        return sorted(self._times, key=lambda time: time.end_s)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
