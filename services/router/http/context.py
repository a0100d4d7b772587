"""What handlers work with: the router's collaborators in one place, and what every handler does first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from common.bus import Bus, Notifications
from common.clock import SystemClock
from common.config import RouterConfig
from common.errors import NotFound, TooLarge
from common.health import Health
from common.ids import Family, ulid
from common.pages.store import PageStore
from common.registry.api_keys import ApiKey, KeyStore
from common.registry.collections import Collections
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.results import Result
from common.wire.workflows import Plan, RequestResult, RequestWork, ResponseOptions, encode_plan
from services.router import metrics
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import LOW_SHARE, REQUEST_CLASSES
from services.router.admission.request_runner import RequestRunner
from services.router.admission.request_store import RequestStore
from services.router.cards import Cards
from services.router.http import limits
from services.router.responses.results import present
from services.router.text.bodies import RequestLimits
from services.router.text.pool import TextPool
from services.router.text.requests import Parcel
from services.router.workflows.runner import WorkflowRunner

PARCEL_ITEMS = 32
PARCEL_TOKENS = 8192
KEY = web.RequestKey("key", ApiKey)
TENANT = web.RequestKey("tenant", str)
REQUEST_ID = web.RequestKey("request_id", str)
MODEL = web.RequestKey("model", str)


class Router:
    """The router's collaborators; one a process."""

    def __init__(
        self,
        config: RouterConfig,
        bus: Bus,
        clock: SystemClock,
        health: Health,
        *,
        cards: Cards,
        pool: TextPool,
        keys: KeyStore,
        notifications: Notifications,
        admission: AdmissionController,
        requests: RequestStore,
        orphans: OrphanReaper,
        runner: RequestRunner,
        pipeline: WorkflowRunner,
        keys_on: bool,
        pages: PageStore | None,
    ) -> None:
        self.config, self.bus, self.clock, self.health = config, bus, clock, health
        self.cards, self.pool, self.keys = cards, pool, keys
        self.notifications, self.admission, self.requests = notifications, admission, requests
        self.orphans, self.runner, self.pipeline = orphans, runner, pipeline
        self.keys_on = keys_on
        self.pages = pages
        self.active = 0
        self._quiet = asyncio.Event()
        self._streams: set[asyncio.Timeout] = set()
        self._turn = 0
        self.proved: set[str] = set()  # fingerprints of models whose chat templates have rendered
        self.depths: dict[str, tuple[int, int]] = {}

    def entered(self) -> None:
        """Count a request that is being handled."""
        self.active += 1
        self._quiet.clear()

    def left(self) -> None:
        """Count a request whose response is written."""
        self.active -= 1
        if self.active == 0:
            self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no request is being handled."""
        if self.active:
            await self._quiet.wait()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[asyncio.Timeout]:
        """Give a stream the limit that `stop_streams` ends it by."""
        limit = asyncio.timeout(None)
        self._streams.add(limit)
        metrics.STREAMS.set(len(self._streams))
        try:
            yield limit
        finally:
            self._streams.discard(limit)
            metrics.STREAMS.set(len(self._streams))

    def stop_streams(self) -> None:
        """End every open stream with an error from which its client goes on at another router."""
        now = asyncio.get_running_loop().time()
        for limit in self._streams:
            with contextlib.suppress(RuntimeError):  # not begun, or ending by itself
                limit.reschedule(now)

    # -- receiving -------------------------------------------------------------------------------------

    def caller(
        self, request: web.Request, raw: bytes = b"", *, default_timeout_s: float | None = None
    ) -> RequestContext:
        """Return who asks and until when; 400 for headers that make no sense."""
        default = default_timeout_s or self.config.request_timeout_s
        owner: ApiKey | None = request.get(KEY)
        own_s = limits.timeout_s(request, self.config, owner.timeout_s if owner else 0.0)
        low = limits.is_low(request, owner.priority if owner else "normal")
        key = limits.idempotency_key(request) if request.method == "POST" else ""
        return RequestContext(
            tenant=request[TENANT],
            key=owner,
            deadline_ms=self.clock.now_ms() + int((own_s or default) * 1000),
            own=own_s is not None,
            share=LOW_SHARE if low else 1.0,
            resume_s=limits.resume_s(request),
            idempotency_key=key,
            body_hash=limits.body_hash(request, raw) if key else b"",
        )

    async def body(self, request: web.Request) -> bytes:
        """Return a request's body within the limits."""
        return await limits.read_body(request, self.config)

    def text_limits(self, family: str = "") -> RequestLimits:
        """Return what one request may hold, and one job: never more than a lane of `family` could."""
        items, tokens = self.depths.get(family, (PARCEL_ITEMS, PARCEL_TOKENS))
        return RequestLimits(
            self.config.max_texts,
            self.config.max_tokens,
            max(1, min(PARCEL_ITEMS, items)),
            max(1, min(PARCEL_TOKENS, tokens)),
        )

    async def encoder_limits(self) -> RequestLimits:
        """Return the limits for the default encoder's lanes."""
        cards = await self.cards.cards()
        encoders = [card for card in cards.values() if card.kind != "generate"]
        names = [card.family for card in encoders if card.family in self.depths]
        return self.text_limits(names[0] if names else "")

    async def collection(self, request: web.Request) -> CollectionRecord:
        """Return the collection a path names; NotFound if the tenant has none of that name."""
        name = request.match_info["name"]
        record = None
        if not name.startswith(".") and len(name) <= 63:
            record = await Collections(self.bus).get(request[TENANT], name)
        if record is None:
            raise NotFound(f"no collection {name[:80]!r}", code="collection_not_found")
        return record

    # -- running ---------------------------------------------------------------------------------------

    def several(
        self, tenant: str, kind: str, plan: Plan, view: ResponseOptions, tokens: int = 0
    ) -> JobSpec:
        """Return a request of several jobs; TooLarge if it does not fit one message."""
        family = self.pipeline.family(hash(ulid()))
        try:
            payload = encode(RequestWork(kind=kind, tenant=tenant, body=encode_plan(plan)))
        except ValueError as error:
            raise TooLarge(f"the request is too large: {error}; split it") from None
        return JobSpec(family, REQUEST_CLASSES, Parcel(payload, 1, 0), view, tokens)

    async def run(
        self, request: web.Request, caller: RequestContext, ask: JobSpec
    ) -> tuple[str, Result]:
        """Run a request to its result; its id goes into x-request-id."""
        request[MODEL] = ask.view.model
        return await self.runner.run(
            caller, ask, lambda name: request.__setitem__(REQUEST_ID, name)
        )

    async def answer(
        self, request: web.Request, caller: RequestContext, ask: JobSpec
    ) -> web.Response:
        """Run a request and return its reply."""
        name, result = await self.run(request, caller, ask)
        began = self.clock.monotonic()
        body = await present(self.bus, self.pool, name, result, ask.view)
        self.admission.policy.hops.replied(self.clock.monotonic() - began)
        self.runner.delivered(caller, name, jobs_of(result))
        return reply(body)

    def next_turn(self) -> int:
        """Return a number one higher than the last: requests go round the partitions."""
        self._turn += 1
        return self._turn

    async def families(self) -> list[Family]:
        """Return every model's families."""
        cards = await self.cards.cards()
        return [Family(c.family, p) for c in cards.values() for p in range(max(c.partitions, 1))]


ROUTER = web.AppKey("router", Router)


def jobs_of(result: Result) -> list[str]:
    """Return the jobs a result refers to."""
    return list(result.jobs) if isinstance(result, RequestResult) else []


def reply(body: bytes, status: int = 200, headers: dict[str, Any] | None = None) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
