"""The two loops. Open: requests leave at their scheduled times and latency counts from then (no coordinated
omission). Closed: so many clients, each sending its next request when the last is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen import stats
from loadgen.bodies import Request
from loadgen.target import Answer, Target
from loadgen.timer import Timer

REFUSED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds from the run's start at which it was due, sent and answered."""

    due_s: float
    sent_s: float
    done_s: float
    status: int
    code: str
    items: int

    @property
    def ok(self) -> bool:
        """True if it was answered with 2xx."""
        return 200 <= self.status < 300

    @property
    def latency_s(self) -> float:
        """Return the seconds from when it was due to its answer."""
        return self.done_s - self.due_s


@dataclass(slots=True)
class Run:
    """What a loop did; `cpu_s` are the load generator's own CPU seconds."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    def summary(self, slo_s: float | None = None) -> dict[str, Any]:
        """Return counts, rates, latency percentiles and, with an SLO, goodput (answers within it a second)."""
        ok = [s for s in self.samples if s.ok]
        refused = [s for s in self.samples if s.status in REFUSED]
        bad = [s for s in self.samples if not s.ok and s.status not in REFUSED]
        seconds = max(self.seconds, 1e-9)
        found: dict[str, Any] = {
            "requests": len(self.samples),
            "ok": len(ok),
            "refused": len(refused),
            "errors": len(bad),
            "codes": dict(Counter(s.code for s in self.samples if not s.ok)),
            "seconds": self.seconds,
            "requests_per_s": len(ok) / seconds,
            "items_per_s": sum(s.items for s in ok) / seconds,
            "latency_s": stats.percentiles([s.latency_s for s in ok]),
            "sent_late_s": stats.percentiles([s.sent_s - s.due_s for s in self.samples]),
            "loadgen_cpu_s": self.cpu_s,
        }
        if slo_s is not None:
            within = sum(1 for s in ok if s.latency_s <= slo_s)
            found |= {"slo_s": slo_s, "goodput_per_s": within / seconds}
            found["within_slo"] = within / max(1, len(self.samples))
        return found


Check = Callable[[Request, Answer], None]


class Load:
    """Runs loops against one target; `check` sees every request with its answer."""

    def __init__(
        self, target: Target, requests: Sequence[Request], check: Check | None = None
    ) -> None:
        self._target = target
        self._requests = itertools.cycle(requests)
        self._check = check
        self._run = Run()
        self._began = 0.0
        self.in_flight = 0

    @property
    def samples(self) -> list[Sample]:
        """Return what has been answered so far, for live progress."""
        return self._run.samples

    async def open(
        self, arrivals: Iterable[float], seconds: float, *, max_in_flight: int = 10_000
    ) -> Run:
        """Send at `arrivals` for `seconds`; wait for every answer.

        A request due while `max_in_flight` are open is recorded as the error `loadgen_full`.
        """
        cpu = self._start()
        timer = Timer()
        async with asyncio.TaskGroup() as group:
            for due in arrivals:
                if due >= seconds:
                    break
                await timer.until(self._began + due)
                if self.in_flight >= max_in_flight:
                    now = time.monotonic() - self._began
                    self.samples.append(Sample(due, now, now, 0, "loadgen_full", 0))
                    continue
                self.in_flight += 1
                group.create_task(self._one(next(self._requests), due))
        timer.close()
        return self._finish(cpu)

    async def closed(
        self, clients: int, *, seconds: float = float("inf"), count: int | None = None
    ) -> Run:
        """Keep `clients` requests open for `seconds`, or until `count` have been sent."""
        cpu = self._start()
        left = iter(range(count)) if count is not None else itertools.count()

        async def client() -> None:
            for _ in left:
                now = time.monotonic() - self._began
                if now >= seconds:
                    return
                self.in_flight += 1
                await self._one(next(self._requests), now)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return self._finish(cpu)

    async def _one(self, request: Request, due: float) -> None:
        sent = time.monotonic() - self._began
        answer = await self._target.send(request)
        done = time.monotonic() - self._began
        self.in_flight -= 1
        sample = Sample(due, sent, done, answer.status, answer.code, request.items)
        self.samples.append(sample)
        if self._check is not None:
            self._check(request, answer)

    def _start(self) -> float:
        self._run = Run()
        self._began = time.monotonic()
        return _own_cpu_s()

    def _finish(self, cpu: float) -> Run:
        self._run.seconds = time.monotonic() - self._began
        self._run.cpu_s = _own_cpu_s() - cpu
        return self._run


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
