"""Load of requests with one answer each, and statistics of their latency."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen import stats
from loadgen.bodies import Request
from loadgen.loop import LoadLoop
from loadgen.target import Target, TargetAnswer

REFUSED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: its due, sent and answered times in seconds from the run's start, and the server's request id."""

    due_s: float
    sent_s: float
    done_s: float
    status: int
    code: str
    items: int
    request_id: str = ""

    @property
    def ok(self) -> bool:
        """True if the answer was 2xx."""
        return 200 <= self.status < 300

    @property
    def latency_s(self) -> float:
        """Return the seconds from the due time to the answer."""
        return self.done_s - self.due_s


@dataclass(slots=True)
class RequestRun:
    """The results of a loop; `cpu_s` are the load generator's own CPU seconds."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    def summary(self, slo_s: float | None = None) -> dict[str, Any]:
        """Return counts, rates, latency percentiles and, with an SLO, goodput (answers within the SLO, per second)."""
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


Check = Callable[[Request, TargetAnswer], None]


class LoadRun(LoadLoop[RequestRun]):
    """Runs loops against one target; `check` is called with every request and its answer."""

    def __init__(
        self, target: Target, requests: Sequence[Request], check: Check | None = None
    ) -> None:
        super().__init__(RequestRun())
        self._target = target
        self._requests = itertools.cycle(requests)
        self._check = check

    @property
    def samples(self) -> list[Sample]:
        """Return the answered requests so far, for live progress."""
        return self.run.samples

    def fresh(self) -> RequestRun:
        """Return an empty run."""
        return RequestRun()

    def full(self, due: float, now: float) -> None:
        """Record a request that was due while too many were open."""
        self.samples.append(Sample(due, now, now, 0, "loadgen_full", 0))

    async def one(self, due: float) -> None:
        """Send the next request and record its answer."""
        request, sent = next(self._requests), self.now()
        answer = await self._target.send(request)
        done = self.now()
        sample = Sample(
            due, sent, done, answer.status, answer.code, request.items, answer.request_id
        )
        self.samples.append(sample)
        if self._check is not None:
            self._check(request, answer)
