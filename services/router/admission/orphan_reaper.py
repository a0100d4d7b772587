"""The list of resumable requests for which this router is responsible, and the cancelling of dead routers' requests."""

from __future__ import annotations

from collections.abc import Iterable

from common import log
from common.bus import Bus
from common.ids import Family
from common.registry.requests import Requests

DEAD_MS = 5000  # a router without a beat for this long is dead
_log = log.get("router")


class OrphanReaper:
    """Keeps the list of one router's resumable requests, and cancels the orphans: requests that dead routers left."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus, self._router, self._requests = bus, router, Requests(bus)

    async def hold(self, request: str, resume_s: float, deadline_ms: int) -> None:
        """Take responsibility for a request until `release`.

        If this router dies, another router cancels the request `resume_s` seconds after the last `beat`.
        """
        await self._requests.hold(request, self._router, resume_s, deadline_ms)

    async def release(self, request: str) -> None:
        """Drop a request that is over from the list."""
        await self._requests.release(request, self._router)

    async def beat(self) -> None:
        """State that this router lives."""
        await self._requests.note_router(self._router)

    async def sweep(self, families: Iterable[Family]) -> list[str]:
        """Cancel the orphans whose clients did not come back within their grace, and return the ids of these orphans.

        After an outage of Redis no router counts as dead until every router has had time for a `beat`.
        """
        if self._bus.connection.policy.reached_for() * 1000 < DEAD_MS:
            return []
        cancelled: list[str] = []
        for router, silent_ms in (await self._requests.silent_routers(DEAD_MS)).items():
            left = [await self._end(family, router, silent_ms, cancelled) for family in families]
            if router != self._router and not any(left):
                await self._requests.forget_router(router)
        return cancelled

    async def _end(self, family: Family, router: str, silent_ms: int, cancelled: list[str]) -> bool:
        """Cancel the overdue orphans of one router in one family; return whether any are not due yet."""
        left = False
        for request, resume_s in (await self._requests.held(family, router)).items():
            state = await self._bus.jobs.get(request)
            orphan = state is not None and not state.over and state.router == router
            early = silent_ms < resume_s * 1000
            if orphan and (early or await self._requests.read_within(request, resume_s)):
                left = True
                continue
            if orphan:
                verdict = await self._bus.control.cancel(request)
                _log.info("request_abandoned", request_id=request, router=router, verdict=verdict)
                cancelled.append(request)
            await self._requests.release(request, router)
        return left
