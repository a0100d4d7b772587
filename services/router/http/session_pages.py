"""/v1/sessions/{id}/export/pages, …/import/pages: a session's KV pages out of this mesh's tiers, and into another's.

They go page by page between the client and the Redis of KV pages, never over the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from common import log
from common.errors import Conflict, NotFound, TooLarge, Unavailable
from common.ids import ulid
from common.pages import codec
from common.pages.bundle import FORMAT, BundleHeader, BundleReader, Renaming, named
from common.pages.chain import Chain
from common.pages.codec import CorruptPage, Header
from common.pages.identity import PageId, owner_id, root_id
from common.pages.keys import GROUPS, PageKey
from common.pages.store import PageStore, Tier, TierDown
from common.registry.sessions import Sessions
from common.wire.sessions import SessionRecord
from services.router.http.context import REQUEST_ID, ROUTER, TENANT, Router, reply
from services.router.http.limits import body_parts
from services.router.http.sessions import own

CONTENT_TYPE = "application/octet-stream"
TOGETHER = 4  # pages in memory at once
RECALL_S = 2.0  # how long pages on disk are waited for
PATIENCE_S = 5.0  # how long an import waits, in all, for room
SLOW_S = 30.0
_ASKED_AT_ONCE = 500
_POLL_S = 0.05
_log = log.get("router")


def _store(router: Router) -> PageStore:
    if router.pages is None:
        raise Conflict(
            "no pages are kept below the workers (SPILLWAY_PAGES_URL is none)", code="no_page_tier"
        )
    return router.pages


def _down(error: TierDown) -> Unavailable:
    _log.warning("pages_redis_down", why=str(error))
    return Unavailable(
        "the Redis of KV pages is away; try again", code="pages_down", retry_after_s=5
    )


async def _chain(router: Router, record: SessionRecord, root: PageId) -> Chain:
    chain = Chain(root)
    for turn in await Sessions(router.bus).turns(record.id):
        chain.add(turn)
    return chain


# -- out -----------------------------------------------------------------------------------------------


async def export(request: web.Request) -> web.StreamResponse:
    """Stream the pages that the tiers have of a session; those that are damaged, or go meanwhile, are left out."""
    router = request.app[ROUTER]
    record, store = await own(request), _store(router)
    root = root_id(record.fingerprint, record.tenant)
    chain = await _chain(router, record, root)
    try:
        found = await _found(store, chain)
    except TierDown as error:
        raise _down(error) from None
    request[REQUEST_ID] = name = f"req-{ulid()}"
    response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "x-request-id": name})
    await response.prepare(request)
    head = BundleHeader(FORMAT, record.model, record.fingerprint, root.hex(), len(found))
    await response.write(head.encode())
    with contextlib.suppress(TierDown, TimeoutError):  # what is sent is sent
        async with contextlib.aclosing(_values(store, chain, found)) as values:
            async for value in values:
                async with asyncio.timeout(SLOW_S):
                    await response.write(value)
    await response.write_eof()
    return response


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
    """Yield the pages that are sound, a few at a time."""
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


async def _read(store: PageStore, keys: list[PageKey], wait_s: float) -> dict[PageKey, bytes]:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + wait_s
    found: dict[PageKey, bytes] = {}
    while True:
        values = zip(keys, await store.get_many(keys), strict=True)
        found |= {key: value for key, value in values if value is not None}
        keys = [key for key in keys if key not in found]
        if not keys or loop.time() >= give_up:
            return found
        await asyncio.sleep(_POLL_S)


# -- in ------------------------------------------------------------------------------------------------


async def load(request: web.Request) -> web.Response:
    """Put the pages of an exported session under the ids they have here; count what was not."""
    router = request.app[ROUTER]
    record, store = await own(request), _store(router)
    taking = Taking(router, store, record)
    reader = BundleReader()
    try:
        async for part in body_parts(request, router.config):
            for header, value in reader.feed(part):
                if taking.renaming is None:
                    assert reader.head is not None
                    await taking.begin(reader.head)
                await taking.take(header, value)
        reader.end()
        if taking.renaming is None and reader.head is not None:
            await taking.begin(reader.head)
        await taking.end(request[TENANT])
    except TierDown as error:
        raise _down(error) from None
    counts = {name: taking.counts[name] for name in Taking.OUTCOMES}
    body = {"object": "session.pages", "session": record.id, **counts, "bytes": taking.bytes}
    return reply(msgspec.json.encode(body))


class Taking:
    """One import on its way: what of it was put, and what was not."""

    OUTCOMES = ("stored", "exists", "refused", "damaged", "foreign")

    def __init__(self, router: Router, store: PageStore, record: SessionRecord) -> None:
        self._router, self._store, self._record = router, store, record
        self.renaming: Renaming | None = None
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self._owner = owner_id(record.tenant)
        self._keys: list[PageKey] = []
        self._patience_s = PATIENCE_S

    async def begin(self, head: BundleHeader) -> None:
        """Learn whose pages they are. Conflict `fingerprint_mismatch` if they mean nothing to the session's model."""
        record = self._record
        if head.fingerprint != record.fingerprint:
            raise Conflict(
                f"the pages were computed by {head.model[:100]!r} of fingerprint {head.fingerprint[:80]!r}; this "
                f"session's tokens are those of {record.fingerprint or 'none'!r}, and its pages are computed anew",
                code="fingerprint_mismatch",
            )
        here = await _chain(self._router, record, root_id(record.fingerprint, record.tenant))
        there = await _chain(self._router, record, bytes.fromhex(head.root))
        self.renaming = Renaming(there, here)

    async def take(self, header: Header, value: bytes) -> None:
        """Put one page. TooLarge if there are more than the session can have."""
        assert self.renaming is not None
        if self.counts.total() >= (len(self.renaming) + 1) * GROUPS:
            raise TooLarge(
                f"there are more pages than the {len(self.renaming)} the session can have",
                code="pages_too_large",
            )
        try:
            page = self.renaming.rename(header, value)
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
        """Put a page; where there is no room for it, kv_store may be making some."""
        while True:
            outcome = await self._store.put(key, value, self._store.ttl_s, self._owner)
            if outcome in ("stored", "exists"):
                return outcome
            if self._patience_s <= 0:
                return "refused"
            self._patience_s -= _POLL_S
            await asyncio.sleep(_POLL_S)

    async def end(self, tenant: str) -> None:
        """Take back what was put for a session that is gone meanwhile. NotFound."""
        record = await Sessions(self._router.bus).get(self._record.id)
        if record is None or record.tenant != tenant:
            await self._store.drop(self._keys)
            raise NotFound(
                "the session was deleted, or has expired, meanwhile", code="session_not_found"
            )
