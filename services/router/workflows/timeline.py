"""The stages of one request on one time axis: their begins and ends, by the clock of the router that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from common.clock import Clock


class StageRun(Struct, frozen=True, omit_defaults=True):
    """One run of a stage: milliseconds from the acceptance of its request; `nth` counts the runs of a stage from 0.

    Runs may overlap, for instance a retrieval and the generation of its interval.
    """

    name: str
    start_ms: float
    end_ms: float
    nth: int = 0


class StageTimeline:
    """The stages that a router has run of one request, in the order in which they ended.

    Stages that another router ran before it died are left out; a repeated stage takes the time of finding its jobs.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._zero_ms = clock.now_ms() - 1000 * clock.perf_s()  # the time at `perf_s` 0
        self._runs: list[tuple[str, int, float, float]] = []

    @contextmanager
    def stage(self, name: str, nth: int = 0) -> Iterator[None]:
        """Record the time that the block takes as one run of a stage, unless the block raises an error."""
        began_s = self._clock.perf_s()
        yield
        self.note(name, nth, began_s, self._clock.perf_s())

    def note(self, name: str, nth: int, began_s: float, ended_s: float) -> None:
        """Record one run of a stage; both times are the clock's `perf_s`."""
        self._runs.append((name, nth, began_s, ended_s))

    def times(self, accepted_ms: int) -> list[StageRun]:
        """Return the runs so far; `accepted_ms` is the time of the request's acceptance, by the bus' clock."""
        return [
            StageRun(
                name, self._since(began_s, accepted_ms), self._since(ended_s, accepted_ms), nth
            )
            for name, nth, began_s, ended_s in self._runs
        ]

    def _since(self, perf_s: float, accepted_ms: int) -> float:
        return round(max(0.0, self._zero_ms + 1000 * perf_s - accepted_ms), 1)
