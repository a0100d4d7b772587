"""/v1/sessions/{id}/export/pages and …/import/pages: a session's KV pages, from one mesh to another.

Pages are copied one by one between the client and the Redis of KV pages, never over the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator

from aiohttp import web

from common import log
from common.errors import Conflict, NotFound, TooLarge, Unavailable
from common.ids import ulid
from common.pages import codec
from common.pages.bundle import FORMAT, BundleHeader, BundleReader, Renaming, named
from common.pages.chain import Chain
from common.pages.codec import CorruptPage, Header
from common.pages.identity import PageId, owner_id, root_id, short_context
from common.pages.keys import GROUPS, PageKey
from common.pages.store import PageStore, Tier, TierDown, Value
from common.registry.sessions import Sessions
from common.wire.sessions import SessionRecord
from services.router.http.receiver import REQUEST_ID, TENANT, Receiver
from services.router.http.records import TenantRecords
from services.router.http.replies import reply_json

CONTENT_TYPE = "application/octet-stream"
TOGETHER = 4  # pages in memory at once
RECALL_S = 2.0  # the wait for pages on disk
PATIENCE_S = 5.0  # the wait of a whole import for room
SLOW_S = 30.0
_ASKED_AT_ONCE = 500
_POLL_S = 0.05
_log = log.get("router")


class SessionPagesApi:
    """Exports and imports the KV pages of a session; `store` is None if no tier below the workers keeps pages."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        sessions: Sessions,
        store: PageStore | None,
    ) -> None:
        self._receiver, self._records = receiver, records
        self._sessions, self._store = sessions, store

    def routes(self) -> list[web.RouteDef]:
        """Return both routes."""
        return [
            web.get("/v1/sessions/{id}/export/pages", self.export),
            web.post("/v1/sessions/{id}/import/pages", self.load),
        ]

    def _tier(self) -> PageStore:
        if self._store is None:
            raise Conflict(
                "no pages are kept below the workers (SPILLWAY_PAGES_URL is none)",
                code="no_page_tier",
            )
        return self._store

    async def export(self, request: web.Request) -> web.StreamResponse:
        """Stream the pages that the tiers have of a session; damaged and vanished pages are left out."""
        record, store = await self._records.session(request), self._tier()
        root = root_id(record.fingerprint, record.tenant)
        chain = await _chain(self._sessions, record, root)
        try:
            found = await _found(store, chain)
        except TierDown as error:
            raise _down(error) from None
        request[REQUEST_ID] = name = f"req-{ulid()}"
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "x-request-id": name})
        await response.prepare(request)
        head = BundleHeader(FORMAT, record.model, record.fingerprint, root.hex(), len(found))
        await response.write(head.encode())
        with contextlib.suppress(TierDown, TimeoutError):  # the pages written so far are sound
            async with contextlib.aclosing(_values(store, chain, found)) as values:
                async for value in values:
                    async with asyncio.timeout(SLOW_S):
                        await response.write(value)
        await response.write_eof()
        return response

    async def load(self, request: web.Request) -> web.Response:
        """Store the pages of an exported session under the ids of this mesh, and count the outcomes."""
        record, store = await self._records.session(request), self._tier()
        taken = PageImport(self._sessions, store, record)
        try:
            await taken.read(self._receiver.parts(request))
            await taken.end(request[TENANT])
        except TierDown as error:
            raise _down(error) from None
        counts = {name: taken.counts[name] for name in PageImport.OUTCOMES}
        body = {"object": "session.pages", "session": record.id, **counts, "bytes": taken.bytes}
        return reply_json(body)


def _down(error: TierDown) -> Unavailable:
    _log.warning("pages_redis_down", why=str(error))
    return Unavailable(
        "the Redis of KV pages is away; try again", code="pages_down", retry_after_s=5
    )


async def _chain(sessions: Sessions, record: SessionRecord, root: PageId) -> Chain:
    chain = Chain(root, short_context(record.fingerprint))
    for turn in await sessions.turns(record.id):
        chain.add(turn)
    return chain


# -- export --------------------------------------------------------------------------------------------


async def _found(store: PageStore, chain: Chain) -> dict[PageKey, Tier]:
    keys = [PageKey(page, group) for page in chain.places for group in range(GROUPS)]
    found: dict[PageKey, Tier] = {}
    for first in range(0, len(keys), _ASKED_AT_ONCE):
        some = keys[first : first + _ASKED_AT_ONCE]
        tiers = zip(some, await store.where(some), strict=True)
        found |= {key: tier for key, tier in tiers if tier is not None}
    return found


async def _values(
    store: PageStore, chain: Chain, found: dict[PageKey, Tier]
) -> AsyncGenerator[bytes, None]:
    """Yield the values of undamaged pages; TOGETHER pages are in memory at a time."""
    keys = list(found)
    for first in range(0, len(keys), TOGETHER):
        some = keys[first : first + TOGETHER]
        below = [key for key in some if found[key] == "disk"]
        await store.recall(below)
        for key, value in (await _read(store, some, RECALL_S if below else 0.0)).items():
            try:
                if codec.check(value, key.id):
                    raise CorruptPage("layers are damaged")
                yield named(value, key, chain.places[key.id])
            except CorruptPage as error:
                _log.warning("page_corrupt", page=key.member, why=str(error))


async def _read(store: PageStore, keys: list[PageKey], wait_s: float) -> dict[PageKey, Value]:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_s
    found: dict[PageKey, Value] = {}
    while True:
        values = zip(keys, await store.get_many(keys), strict=True)
        found |= {key: value for key, value in values if value is not None}
        keys = [key for key in keys if key not in found]
        if not keys or loop.time() >= give_up:
            return found
        await asyncio.sleep(_POLL_S)


# -- import --------------------------------------------------------------------------------------------


class PageImport:
    """One import, which stores pages one by one and counts the outcomes."""

    OUTCOMES = ("stored", "exists", "refused", "damaged", "foreign")

    def __init__(self, sessions: Sessions, store: PageStore, record: SessionRecord) -> None:
        self._sessions, self._store, self._record = sessions, store, record
        self._renaming: Renaming | None = None
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self._owner = owner_id(record.tenant)
        self._keys: list[PageKey] = []
        self._patience_s = PATIENCE_S

    async def read(self, parts: AsyncIterator[bytes]) -> None:
        """Store every page of a bundle. Conflict `fingerprint_mismatch`; TooLarge `pages_too_large`."""
        reader = BundleReader()
        async for part in parts:
            for header, value in reader.feed(part):
                assert reader.head is not None
                await self._take(await self._begun(reader.head), header, value)
        reader.end()
        if reader.head is not None:
            await self._begun(reader.head)

    async def _begun(self, head: BundleHeader) -> Renaming:
        """Return the names in this mesh of the bundle's pages. Conflict if another model computed them."""
        if self._renaming is not None:
            return self._renaming
        record = self._record
        if head.fingerprint != record.fingerprint:
            raise Conflict(
                f"the pages were computed by {head.model[:100]!r} of fingerprint {head.fingerprint[:80]!r}; this "
                f"session's tokens are those of {record.fingerprint or 'none'!r}, and its pages are computed anew",
                code="fingerprint_mismatch",
            )
        here = await _chain(self._sessions, record, root_id(record.fingerprint, record.tenant))
        there = await _chain(self._sessions, record, bytes.fromhex(head.root))
        self._renaming = Renaming(there, here)
        return self._renaming

    async def _take(self, renaming: Renaming, header: Header, value: bytes) -> None:
        """Store one page. TooLarge if there are more pages than the session can have."""
        if self.counts.total() >= (len(renaming) + 1) * GROUPS:
            raise TooLarge(
                f"there are more pages than the {len(renaming)} the session can have",
                code="pages_too_large",
            )
        try:
            page = renaming.rename(header, value)
        except CorruptPage as error:
            _log.warning("page_corrupt", why=str(error))
            self.counts["damaged"] += 1
            return
        if page is None:
            self.counts["foreign"] += 1
            return
        outcome = await self._put(*page)
        self.counts[outcome] += 1
        if outcome == "stored":
            self.bytes += len(value)
            self._keys.append(page[0])

    async def _put(self, key: PageKey, value: bytes) -> str:
        """Store a page; retry a refused page within PATIENCE_S, since kv_store may be evicting others."""
        while True:
            outcome = await self._store.put(key, value, self._store.ttl_s, self._owner)
            if outcome in ("stored", "exists"):
                return outcome
            if self._patience_s <= 0:
                return "refused"
            self._patience_s -= _POLL_S
            await asyncio.sleep(_POLL_S)

    async def end(self, tenant: str) -> None:
        """Finish the import; if the session was deleted meanwhile, drop its pages and raise NotFound."""
        record = await self._sessions.get(self._record.id)
        if record is None or record.tenant != tenant:
            await self._store.drop(self._keys)
            raise NotFound(
                "the session was deleted, or has expired, meanwhile", code="session_not_found"
            )
