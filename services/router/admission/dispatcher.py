"""Requests from the door to their outcome: waiting for them, and what becomes of those nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from common import log
from common.bus import Bus, BusDown, Notifications
from common.bus.events import Subscription
from common.errors import SpillwayError
from common.registry.api_keys import KeyStore
from common.registry.idempotency import Idempotency
from common.wire.results import Event, Result
from services.router.admission.controller import (
    GENERATE_CLASSES,
    REQUEST_CLASSES,
    SEARCH_CLASSES,
    AdmissionController,
    JobSpec,
    RequestContext,
)
from services.router.admission.policy import EMBED_CLASSES, LanePolicy
from services.router.background import Background
from services.router.responses.outcomes import result_of

__all__ = [
    "EMBED_CLASSES",
    "GENERATE_CLASSES",
    "REQUEST_CLASSES",
    "SEARCH_CLASSES",
    "Dispatcher",
    "JobSpec",
    "RequestContext",
]
_log = log.get("router")


class Dispatcher(AdmissionController):
    """Admits requests and waits for them; one a router."""

    def __init__(
        self,
        bus: Bus,
        journal: Notifications,
        key_store: KeyStore,
        background: Background,
        policy: LanePolicy,
    ) -> None:
        super().__init__(bus, journal, key_store, background, policy)
        self.on_flagged: Callable[[], None] = lambda: None
        self._readers: dict[str, int] = {}

    async def open(
        self, caller: RequestContext, ask: JobSpec, named: Callable[[str], None] | None = None
    ) -> tuple[str, Subscription | None]:
        """Submit a request and return its id and bell; a client that leaves meanwhile has left the request.

        `named` is told the id as soon as the request is accepted.
        """
        submitted = asyncio.create_task(self.submit(caller, ask))
        try:
            request, bell = await asyncio.shield(submitted)
        except asyncio.CancelledError:
            self.background.spawn(self._abandon(submitted, caller))
            raise
        if named is not None:
            named(request)
        return request, bell

    async def run(
        self, caller: RequestContext, ask: JobSpec, named: Callable[[str], None] | None = None
    ) -> tuple[str, Result]:
        """Submit a request and return its id and result, or raise its error; a disconnect cancels it if attached."""
        request, bell = await self.open(caller, ask, named)
        try:
            event = await self.wait(request, caller.deadline_ms, bell)
        except asyncio.CancelledError:
            self.left(caller, request, bell)
            raise
        await self.ended(caller, request, event)
        return request, result_of(event)

    async def ended(self, caller: RequestContext, request: str, event: Event) -> None:
        """Do what is due when a request's outcome is known to the client that asked."""
        if caller.key is not None and caller.key.concurrency:
            self.background.spawn(self.keys.leave(caller.key, request))
        if caller.resume_s > 0 and event.index >= 0:
            self.background.spawn(self.graces.release(request))
        if caller.idempotency_key and event.kind != "result" and event.index >= 0:
            # It ended without a result: the next try under this key is a new request, not the same failure again.
            with contextlib.suppress(BusDown):
                await Idempotency(self.bus).release(caller.tenant, caller.idempotency_key, request)

    async def wait(self, request: str, deadline_ms: int, bell: Subscription | None = None) -> Event:
        """Return a request's outcome; counts as a reader of it while waiting."""
        with self.reading(request):
            return await self.journal.end(request, deadline_ms, bell)

    @contextlib.contextmanager
    def reading(self, request: str) -> Iterator[None]:
        """Count as a reader of a request within the block."""
        self._readers[request] = self._readers.get(request, 0) + 1
        try:
            yield
        finally:
            self._readers[request] -= 1
            if self._readers[request] == 0:
                del self._readers[request]

    def left(self, caller: RequestContext, request: str, bell: Subscription | None = None) -> None:
        """Note that a request's client left: cancelled at once if attached, after its grace if resumable."""
        if bell is not None:
            bell.close()
        self.background.spawn(self._outlive(caller, request))

    async def _abandon(
        self, submitted: asyncio.Task[tuple[str, Subscription | None]], caller: RequestContext
    ) -> None:
        try:
            request, bell = await submitted
        except SpillwayError:
            return
        self.left(caller, request, bell)

    async def _outlive(self, caller: RequestContext, request: str) -> None:
        if caller.key is not None:
            await self.keys.leave(caller.key, request)
        if self.draining or (caller.idempotency_key and caller.resume_s <= 0):
            return  # a router that stops is not a client that left
        if caller.resume_s > 0:
            while True:
                await asyncio.sleep(caller.resume_s)
                if request in self._readers:
                    return
                if not await self.seen(request, caller.resume_s):
                    break
                state = await self.bus.jobs.get(request)
                if state is None or state.over or state.router != self.router:
                    return  # over, or another router answers for it by now
            await self.graces.release(request)
        verdict = await self.cancel(request)
        _log.info("request_abandoned", request_id=request, verdict=verdict)

    async def cancel(self, request: str) -> str:
        """Cancel a request: "removed", "flagged", "over" or "unknown"."""
        verdict = await self.bus.control.cancel(request)
        if verdict == "flagged":
            self.on_flagged()
        return verdict

    def delivered(self, caller: RequestContext, request: str, jobs: Sequence[str] = ()) -> None:
        """Let what an attached request left on the bus go soon: its client has the result."""
        if caller.attached:
            self.deliver(request, jobs)
