"""The spans of what a worker does with its leases, from reading to end; and of those a dead worker left open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from common import tracing
from common.bus import metrics
from common.bus.recovery import Entry
from common.clock import SYSTEM
from common.ids import Family
from common.tracing import Attributes

if TYPE_CHECKING:
    from common.worker.leases import Lease


class Spans:
    """Open spans by lease, of one worker in one family; none while traces are off."""

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
        """Return a lease's span; where traces are off, the trace that it belongs to."""
        return self._open.get(lease.fence) or tracing.remote(lease.traceparent)

    def batch(self, leases: Iterable[Lease]) -> Span:
        """Begin the span of what is done for several leases at once: linked to all, under the first of them."""
        spans = [self._open[lease.fence] for lease in leases if lease.fence in self._open]
        linked = [span for span in spans if span.is_recording()]
        if not linked:
            return tracing.NONE
        told = {"messaging.batch.message_count": len(spans)}
        return tracing.start("batch", "internal", linked[0], links=linked, attributes=told)

    def end(self, lease: Lease, outcome: str) -> None:
        """End a lease's span with what became of it: "ok", "returned", or the code of an error."""
        span = self._open.pop(lease.fence, None)
        if span is not None:
            span.set_attribute("spillway.outcome", outcome)
            if outcome not in {"ok", "returned"}:
                tracing.fail(span, outcome)
            span.end()

    def lost(self, cls: str, entry: Entry) -> None:
        """Make the span that a lease's worker did not live to end, from its delivery until now."""
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
