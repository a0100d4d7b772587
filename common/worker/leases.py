"""The leases of one worker in one family, and the spans that trace their processing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry.trace import Span

from common import tracing
from common.bus import metrics
from common.bus.recovery import Entry
from common.clock import SYSTEM
from common.ids import Family
from common.tracing import Attributes


class Lease(NamedTuple):
    """A worker's right to one job; `epoch` is the delivery count by which results of other workers are refused.

    The job should end by `due_ms`, is planned in `batch` (0: none), and was predicted to end by `finish_ms` (0: no
    prediction). Nobody has leased a `fresh` job before, so its log is empty.
    """

    job: str
    payload: bytes
    items: int
    tokens: int
    deadline_ms: int
    router: str
    attempts: int
    alone: bool
    cls: str
    entry: str
    epoch: int
    worker: str
    traceparent: str = ""
    due_ms: int = 0
    batch: int = 0
    finish_ms: int = 0
    fresh: bool = False

    @property
    def fence(self) -> tuple[str, str, int]:
        """The values that distinguish this lease from all other leases of the same job."""
        return self.worker, self.entry, self.epoch


class Spans:
    """The open spans of one worker in one family, by lease; none while tracing is off."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._open: dict[tuple[str, str, int], Span] = {}

    def begin(self, lease: Lease) -> None:
        """Begin the span of a lease's processing, under the admission of its job."""
        if tracing.on():
            told = self._told(lease.cls, lease.job, lease.worker, lease.attempts)
            self._open[lease.fence] = tracing.start(
                self._name, "consumer", tracing.remote(lease.traceparent), attributes=told
            )

    def of(self, lease: Lease) -> Span:
        """Return a lease's span; while tracing is off, the trace that the lease belongs to."""
        return self._open.get(lease.fence) or tracing.remote(lease.traceparent)

    def batch(self, leases: Iterable[Lease]) -> Span:
        """Begin the span of a batch of leases: a child of the first lease's span, with links to all."""
        spans = [self._open[lease.fence] for lease in leases if lease.fence in self._open]
        linked = [span for span in spans if span.is_recording()]
        if not linked:
            return tracing.NONE
        told = {"messaging.batch.message_count": len(spans)}
        return tracing.start("batch", "internal", linked[0], links=linked, attributes=told)

    def end(self, lease: Lease, outcome: str) -> None:
        """End a lease's span with its outcome: "ok", "returned", or the code of an error."""
        span = self._open.pop(lease.fence, None)
        if span is not None:
            span.set_attribute("spillway.outcome", outcome)
            if outcome not in {"ok", "returned"}:
                tracing.fail(span, outcome)
            span.end()

    def lost(self, cls: str, entry: Entry) -> None:
        """Record the span of a lease whose worker died, from its delivery until now."""
        if not tracing.on():
            return
        told = self._told(cls, entry.job, entry.holder, entry.deliveries)
        since_ns = SYSTEM.unix_ns() - entry.idle_ms * 1_000_000
        span = tracing.start(
            self._name,
            "consumer",
            tracing.remote(entry.traceparent),
            attributes=told,
            since_ns=since_ns,
        )
        span.set_attribute("spillway.outcome", "worker_lost")
        tracing.fail(span, "worker_lost")
        span.end()

    @property
    def _name(self) -> str:
        return f"process {self._family.name.split('.')[0]}"

    def _told(self, cls: str, job: str, worker: str, attempt: int) -> Attributes:
        return {
            "messaging.system": "redis",
            "messaging.destination.name": metrics.lane_label(self._family, cls),
            "messaging.message.id": job,
            "spillway.worker": worker,
            "spillway.attempt": attempt,
        }


class HeldLeases:
    """The leases that one worker has read and not ended; `changed` is set when there may be more room."""

    def __init__(self, family: Family) -> None:
        self._held: dict[str, Lease] = {}
        self.changed = asyncio.Event()
        self.spans = Spans(family)

    @property
    def held(self) -> Mapping[str, Lease]:
        """Job id -> lease."""
        return self._held

    @property
    def runs_alone(self) -> bool:
        """True while a job runs that must run alone."""
        return any(lease.alone for lease in self._held.values())

    def span(self, job: str) -> Span:
        """Return the span of a held job's processing; while tracing is off, the trace that the job belongs to."""
        lease = self._held.get(job)
        return tracing.NONE if lease is None else self.spans.of(lease)

    def wake(self) -> None:
        """Wake a reader that waits for room; the end of a lease wakes the reader anyway."""
        self.changed.set()

    def hold(self, lease: Lease) -> None:
        """Add a lease and begin its span."""
        self._held[lease.job] = lease
        self.spans.begin(lease)

    def is_held(self, lease: Lease) -> bool:
        """True if this lease itself is held, not only a later lease of the same job."""
        held = self._held.get(lease.job)
        return held is not None and held.fence == lease.fence

    def current(self, lease: Lease) -> Lease:
        """Return the held lease, whose router may have changed since the caller read it."""
        return self._held[lease.job] if self.is_held(lease) else lease

    def reroute(self, lease: Lease, router: str) -> None:
        """Record that another router listens for the events of a held job."""
        if self.is_held(lease):
            self._held[lease.job] = lease._replace(router=router)

    def forget(self, lease: Lease) -> None:
        """Remove a lease whose span has ended; a later lease of the same job stays."""
        if self.is_held(lease):
            del self._held[lease.job]
            self.wake()

    def let_go(self, lease: Lease) -> None:
        """Remove a lease that could not be ended; its job is soon tried again, as a lost delivery."""
        if self.is_held(lease):
            self.spans.end(lease, "lost")
            self.forget(lease)

    def drop_all(self, why: str) -> None:
        """Remove every lease; their spans end with the outcome `why`."""
        for lease in self._held.values():
            self.spans.end(lease, why)
        self._held.clear()
        self.wake()
