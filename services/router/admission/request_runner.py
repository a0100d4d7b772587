"""Requests from acceptance to outcome: the router runs them for their clients, and cancels them if clients leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from common import log
from common.bus import Bus, BusDown, Notifications
from common.bus.events import Subscription
from common.errors import SpillwayError
from common.registry.idempotency import Idempotency
from common.registry.quotas import Quotas
from common.registry.requests import Requests
from common.wire.results import Event, Result
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.request_store import RequestStore
from services.router.responses.outcomes import result_of

_log = log.get("router")


class RequestRunner:
    """Runs requests and follows them to their outcomes; one per router.

    `on_flagged` is called after a running job was flagged as cancelled, so that a workflow on this router stops at
    once.
    """

    def __init__(
        self,
        bus: Bus,
        notifications: Notifications,
        quotas: Quotas,
        admission: AdmissionController,
        store: RequestStore,
        orphans: OrphanReaper,
    ) -> None:
        self.on_flagged: Callable[[], None] = lambda: None
        self._bus, self._notifications, self._quotas = bus, notifications, quotas
        self._admission, self._store, self._orphans = admission, store, orphans
        self._readers: dict[str, int] = {}

    async def open(
        self, caller: RequestContext, spec: JobSpec, named: Callable[[str], None] | None = None
    ) -> tuple[str, Subscription | None]:
        """Accept a request and return its id and subscription; if the caller is cancelled, the request counts as left.

        `named` is called with the id as soon as the request is accepted.
        """
        accepting = asyncio.create_task(self._admission.accept(caller, spec))
        try:
            request, subscription = await asyncio.shield(accepting)
        except asyncio.CancelledError:
            self._spawn(self._abandon(accepting, caller))
            raise
        if named is not None:
            named(request)
        return request, subscription

    async def run(
        self, caller: RequestContext, spec: JobSpec, named: Callable[[str], None] | None = None
    ) -> tuple[str, Result]:
        """Accept a request and return its id and result, or raise its error; a disconnect cancels it if attached."""
        request, subscription = await self.open(caller, spec, named)
        try:
            event = await self.wait(request, caller.deadline_ms, subscription)
        except asyncio.CancelledError:
            self.left(caller, request, subscription)
            raise
        await self.ended(caller, request, event)
        return request, result_of(event)

    async def wait(
        self, request: str, deadline_ms: int, subscription: Subscription | None = None
    ) -> Event:
        """Return a request's outcome; while waiting, the caller counts as a reader of the request."""
        with self.reading(request):
            return await self._notifications.end(request, deadline_ms, subscription)

    @contextlib.contextmanager
    def reading(self, request: str) -> Iterator[None]:
        """Count the block as a reader of a request."""
        self._readers[request] = self._readers.get(request, 0) + 1
        try:
            yield
        finally:
            self._readers[request] -= 1
            if self._readers[request] == 0:
                del self._readers[request]

    async def ended(self, caller: RequestContext, request: str, event: Event) -> None:
        """Free a request's quota, list entry and claim, once the client that sent it knows the outcome."""
        if caller.key is not None and caller.key.concurrency:
            self._spawn(self._quotas.leave(caller.key, request))
        self.settled(caller, request, event)
        if caller.idempotency_key and event.kind != "result" and event.index >= 0:
            # Without a result, the next try under this key is a new request instead of the same failure again.
            with contextlib.suppress(BusDown):
                await Idempotency(self._bus).release(caller.tenant, caller.idempotency_key, request)

    def settled(self, caller: RequestContext, request: str, event: Event) -> None:
        """Drop a resumable request that has ended from the list, once any of its readers knows the outcome."""
        if caller.resume_s > 0 and event.index >= 0:
            self._spawn(self._orphans.release(request))

    def delivered(self, caller: RequestContext, request: str, jobs: Sequence[str] = ()) -> None:
        """Let an attached request and its jobs be removed soon: the client has the result."""
        if caller.attached:
            self._store.delivered(request, jobs)

    def left(
        self, caller: RequestContext, request: str, subscription: Subscription | None = None
    ) -> None:
        """Cancel a request whose client left: at once if attached, after its grace if resumable."""
        if subscription is not None:
            subscription.close()
        self._spawn(self._outlive(caller, request))

    async def cancel(self, request: str) -> str:
        """Cancel a request; return "removed", "flagged", "over" or "unknown"."""
        verdict = await self._bus.control.cancel(request)
        if verdict == "flagged":
            self.on_flagged()
        return verdict

    async def _abandon(
        self, accepting: asyncio.Task[tuple[str, Subscription | None]], caller: RequestContext
    ) -> None:
        try:
            request, subscription = await accepting
        except SpillwayError:
            return
        self.left(caller, request, subscription)

    async def _outlive(self, caller: RequestContext, request: str) -> None:
        """Cancel a request that has no reader when its grace is over."""
        if caller.key is not None:
            await self._quotas.leave(caller.key, request)
        if self._admission.draining or (caller.idempotency_key and caller.resume_s <= 0):
            # A stopping router disconnects its clients itself; a client with an idempotency key can come back with the
            # key.
            return
        if caller.resume_s > 0:
            if not await self._unread(request, caller.resume_s):
                return
            await self._orphans.release(request)
        verdict = await self.cancel(request)
        _log.info("request_abandoned", request_id=request, verdict=verdict)

    async def _unread(self, request: str, resume_s: float) -> bool:
        """Wait for `resume_s` without a client of a request; False if a client reads it, or another router has it."""
        while True:
            await asyncio.sleep(resume_s)
            if request in self._readers:
                return False
            if not await Requests(self._bus).read_within(request, resume_s):
                return True
            state = await self._bus.jobs.get(request)
            if state is None or state.over or state.router != self._admission.router:
                return False

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._bus.supervisor.spawn(work, "end a request")
