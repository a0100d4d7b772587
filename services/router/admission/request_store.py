"""Request records: the format of the response, the tenant, and the expiry once the result is delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from common.bus import Bus
from common.errors import NotFound
from common.ids import family_of
from common.registry.requests import Requests
from common.wire.workflows import ResponseOptions, decode_options

DELIVERED_S = 30.0
_MOST_DELIVERED = 500_000


class RequestStore:
    """Reads request records, and removes those whose results are delivered; one per router."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._delivered: deque[tuple[float, str]] = deque(maxlen=_MOST_DELIVERED)

    async def options(self, request: str) -> ResponseOptions | None:
        """Return the format of a request's response, None if none was stored."""
        raw = await self._bus.jobs.view(request)
        return None if raw is None else decode_options(raw)

    async def owned(self, request: str, tenant: str) -> None:
        """Check that a request exists and is the tenant's; NotFound otherwise."""
        try:
            family_of(request)
        except ValueError:
            raise _no_request(request) from None
        state = await self._bus.jobs.get(request)
        if state is None or state.tenant != tenant:
            raise _no_request(request)

    async def note_reader(self, request: str) -> None:
        """Record that a client came back for a request, so that the request is not cancelled as unread."""
        await Requests(self._bus).note_reader(request)

    def delivered(self, request: str, jobs: Sequence[str] = ()) -> None:
        """Record that the client has the result: `sweep` removes the request and its jobs DELIVERED_S later."""
        self.passed((request, *jobs))

    def passed(self, jobs: Iterable[str]) -> None:
        """Record that nobody reads these jobs any more: `sweep` removes them DELIVERED_S later."""
        now = self._bus.clock.monotonic()
        self._delivered.extend((now, job) for job in jobs)

    async def sweep(self) -> None:
        """Remove requests delivered more than DELIVERED_S ago; those left when a router stops expire by themselves."""
        before = self._bus.clock.monotonic() - DELIVERED_S
        jobs: list[str] = []
        while self._delivered and self._delivered[0][0] < before:
            jobs.append(self._delivered.popleft()[1])
        await Requests(self._bus).remove(jobs)


def _no_request(request: str) -> NotFound:
    return NotFound(
        f"no request {request[:120]!r}: unknown, or expired ten minutes after its deadline",
        code="request_not_found",
    )
