"""Records named in paths: collections, sessions and requests, which only their own tenant may see."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from common.bus import Bus
from common.errors import NotFound
from common.registry.idempotency import Idempotency
from common.registry.sessions import Sessions
from common.wire.registry import CollectionRecord
from common.wire.sessions import SessionRecord
from services.router.admission.request_store import RequestStore
from services.router.http.receiver import MODEL, TENANT
from services.router.recent_collections import RecentCollections

SAMPLES = frozenset({"docs", "handbook"})


def no_collection(name: str, param: str | None = None) -> NotFound:
    """Return the error for an unknown collection; for a sample, with the command that loads the sample."""
    more = "; `spillway samples` loads the sample collections" if name in SAMPLES else ""
    return NotFound(f"no collection {name!r}{more}", code="collection_not_found", param=param)


class TenantRecords:
    """Finds the record that a request's path names; NotFound if its tenant has none of that name."""

    def __init__(self, bus: Bus, store: RequestStore, collections: RecentCollections) -> None:
        self._collections, self._sessions = collections, Sessions(bus)
        self._claims, self._store = Idempotency(bus), store

    async def collection(self, request: web.Request) -> CollectionRecord:
        """Return the collection of a path's `name`; NotFound `collection_not_found`."""
        return await self._found(request, self._collections.now)

    async def recent_collection(self, request: web.Request) -> CollectionRecord:
        """Return the collection of a path's `name` as it was a moment ago; NotFound `collection_not_found`.

        If another router has replaced or deleted the collection since, its shards refuse the request: then look again.
        """
        return await self._found(request, self._collections.recent)

    async def _found(
        self,
        request: web.Request,
        look: Callable[[str, str], Awaitable[CollectionRecord | None]],
    ) -> CollectionRecord:
        name = request.match_info["name"]
        record = None
        if not name.startswith(".") and len(name) <= 63:
            record = await look(request[TENANT], name)
        if record is None:
            raise no_collection(name[:80])
        return record

    def forget_collection(self, record: CollectionRecord) -> None:
        """Drop a collection's record, which this router has just changed, so that the next use looks it up."""
        self._collections.forget(record)

    async def session(self, request: web.Request, *, deleted: bool = False) -> SessionRecord:
        """Return the session of a path's `id`, with `deleted` also a deleted one; NotFound `session_not_found`."""
        name = request.match_info["id"]
        try:
            found = await self._sessions.stored(name)
        except ValueError:
            found = None
        if found is None or found.tenant != request[TENANT] or (found.deleted and not deleted):
            raise NotFound(
                f"no session {name[:120]!r}: it is unknown, deleted or expired",
                code="session_not_found",
            )
        request[MODEL] = found.model
        return found

    async def request(self, request: web.Request) -> str:
        """Return the request of a path's `id`, which may be an idempotency key; NotFound `request_not_found`."""
        name = request.match_info["id"]
        if "~" not in name:  # the Idempotency-Key of a client that knows no id yet
            name = await self._claims.claimed(request[TENANT], name) or name
        await self._store.owned(name, request[TENANT])
        return name
