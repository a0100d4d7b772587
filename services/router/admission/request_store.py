"""What is kept of a request beside its job: how its result is to be shown, who came back for it, when it may go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from common.bus import Bus, keys
from common.errors import NotFound
from common.ids import Family, family_of
from common.wire.workflows import ResponseOptions, decode_options

DELIVERED_S = 30.0
AFTER_S = 600
_SWEPT_KEYS = 400
_MOST_DELIVERED = 500_000


class RequestStore:
    """Views, readers and delivered results of requests."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._delivered: deque[tuple[float, str]] = deque(maxlen=_MOST_DELIVERED)

    async def note_reader(self, request: str) -> None:
        """Remember that somebody came back for a request, at whichever router."""
        await self.bus.connection.call(
            "SET", keys.seen(request), self.bus.clock.now_ms(), "EX", AFTER_S
        )

    async def seen(self, request: str, within_s: float) -> bool:
        """Return whether somebody came back for a request within the last `within_s`."""
        raw = await self.bus.connection.call("GET", keys.seen(request))
        return raw is not None and self.bus.clock.now_ms() - int(raw) <= within_s * 1000

    def deliver(self, request: str, jobs: Sequence[str] = ()) -> None:
        """Let what a request left on the bus go soon: its client has the result."""
        now = self.bus.clock.monotonic()
        self._delivered.extend((now, job) for job in (request, *jobs))

    async def sweep(self) -> None:
        """Remove what was delivered some time ago, many jobs a command: one command a job would cost more than its end.

        What a stopping router leaves goes by its own time to live.
        """
        before = self.bus.clock.monotonic() - DELIVERED_S
        by_family: dict[Family, list[str]] = {}
        while self._delivered and self._delivered[0][0] < before:
            _, job = self._delivered.popleft()
            family = family_of(job)
            names = by_family.setdefault(family, [])
            names += [keys.log(job), keys.job(job)]
        for names in by_family.values():
            for first in range(0, len(names), _SWEPT_KEYS):
                await self.bus.connection.call("UNLINK", *names[first : first + _SWEPT_KEYS])

    async def view(self, request: str) -> ResponseOptions | None:
        """Return how a request's result is to be shown, if that was kept."""
        raw = await self.bus.jobs.view(request)
        return None if raw is None else decode_options(raw)

    async def owned(self, request: str, tenant: str) -> None:
        """Check that a request exists and is the tenant's; NotFound otherwise."""
        try:
            family_of(request)
        except ValueError:
            raise _no_request(request) from None
        state = await self.bus.jobs.get(request)
        if state is None or state.tenant != tenant:
            raise _no_request(request)


def _no_request(request: str) -> NotFound:
    return NotFound(
        f"no request {request[:120]!r}: unknown, or expired ten minutes after its deadline",
        code="request_not_found",
    )
