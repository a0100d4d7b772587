"""The open and the closed loop of load.

Open: requests leave at their scheduled times, and latency counts from then (no coordinated omission). Closed: a number
of clients, each of which sends its next request when its last one is answered.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import resource
import time
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from loadgen.timer import Timer


class Timed(Protocol):
    """The fields of a run that a loop sets at its end."""

    seconds: float
    cpu_s: float


R = TypeVar("R", bound=Timed)


class LoadLoop(abc.ABC, Generic[R]):
    """Runs `one` again and again, and gathers the results in `run`."""

    def __init__(self, run: R) -> None:
        self.run = run
        self.began = 0.0
        self.in_flight = 0

    @abc.abstractmethod
    def fresh(self) -> R:
        """Return an empty run."""

    @abc.abstractmethod
    async def one(self, due: float) -> None:
        """Do one piece of work, due `due` seconds after the start, and record it in `run`."""

    @abc.abstractmethod
    def full(self, due: float, now: float) -> None:
        """Record work that was due while too many pieces were open."""

    def now(self) -> float:
        """Return the seconds since the run's start."""
        return time.monotonic() - self.began

    async def open(
        self, arrivals: Iterable[float], seconds: float, *, max_in_flight: int = 10_000
    ) -> R:
        """Begin work at `arrivals` for `seconds`; wait until all work has ended.

        Work due while `max_in_flight` pieces are open is recorded as the error `loadgen_full`.
        """
        cpu = self._start()
        timer = Timer()
        async with asyncio.TaskGroup() as group:
            for due in arrivals:
                if due >= seconds:
                    break
                await timer.until(self.began + due)
                if self.in_flight >= max_in_flight:
                    self.full(due, self.now())
                    continue
                self.in_flight += 1
                group.create_task(self._counted(due))
        timer.close()
        return self._finish(cpu)

    async def closed(
        self, clients: int, *, seconds: float = float("inf"), count: int | None = None
    ) -> R:
        """Keep `clients` pieces of work open for `seconds`, or until `count` pieces were begun."""
        cpu = self._start()
        left = iter(range(count)) if count is not None else itertools.count()

        async def client() -> None:
            for _ in left:
                now = self.now()
                if now >= seconds:
                    return
                self.in_flight += 1
                await self._counted(now)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return self._finish(cpu)

    async def _counted(self, due: float) -> None:
        try:
            await self.one(due)
        finally:
            self.in_flight -= 1

    def _start(self) -> float:
        self.run = self.fresh()
        self.began = time.monotonic()
        return _own_cpu_s()

    def _finish(self, cpu: float) -> R:
        self.run.seconds = self.now()
        self.run.cpu_s = _own_cpu_s() - cpu
        return self.run


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
