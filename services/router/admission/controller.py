"""The door: claims, quotas and admission of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from common import log
from common.bus import Bus, BusDown, NewJob, Notifications
from common.bus.events import Subscription
from common.bus.metrics import lane_label
from common.errors import (
    Conflict,
    DeadlineExceeded,
    RateLimited,
    SpillwayError,
)
from common.ids import Family, family_of, job_id, ulid
from common.pages.identity import PageId
from common.registry.api_keys import ApiKey, Charge, KeyStore
from common.registry.idempotency import Idempotency
from common.wire.registry import WorkerRecord
from common.wire.workflows import ResponseOptions, encode_options
from services.router import metrics
from services.router.admission.affinity import Preference, preferred
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import LanePolicy
from services.router.admission.refusals import refusal, retry_after
from services.router.admission.request_store import RequestStore
from services.router.background import Background
from services.router.text.requests import Parcel

GENERATE_CLASSES = ("gpu",)
SEARCH_CLASSES = ("cpu",)
REQUEST_CLASSES = ("router",)
OWN_S = 3600.0  # what it is worth that the router which asked runs a request of several jobs
_log = log.get("router")


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, until when, and what is to happen when the connection goes.

    `own` says that the client or its key set the deadline, `share` below 1 leaves the rest of a lane to others.
    """

    tenant: str
    key: ApiKey | None
    deadline_ms: int
    own: bool = False
    share: float = 1.0
    resume_s: float = 0.0
    idempotency_key: str = ""
    body_hash: bytes = b""

    @property
    def low(self) -> bool:
        """True if others go before it."""
        return self.share < 1

    @property
    def attached(self) -> bool:
        """True if a disconnect cancels the request."""
        return self.resume_s <= 0 and not self.idempotency_key


class JobSpec(NamedTuple):
    """One job that is a request: where it goes, what it holds, and how its result is shown.

    `charge_tokens` is what a key's quota pays for it, of which `view.tokens` came in. `session` makes it the next turn
    after `version`; by that and by `marks`, of its prompt's prefix, the worker is found that holds its pages.
    """

    family: Family
    classes: Sequence[str]
    parcel: Parcel
    view: ResponseOptions
    charge_tokens: int = 0
    session: str = ""
    version: int = 0
    marks: Sequence[PageId] = ()


class AdmissionController(RequestStore):
    """Admits requests."""

    def __init__(
        self,
        bus: Bus,
        journal: Notifications,
        key_store: KeyStore,
        background: Background,
        policy: LanePolicy,
    ) -> None:
        super().__init__(bus)
        self.policy = policy
        self.journal, self.keys = journal, key_store
        self.background = background
        self.router = journal.router
        self.prefer: dict[Family, str] = {}
        self.families: dict[Family, float] = {}
        self.graces = OrphanReaper(bus, journal.router, self.seen)
        self.draining = False

    # -- the door --------------------------------------------------------------------------------------

    async def submit(self, caller: RequestContext, ask: JobSpec) -> tuple[str, Subscription | None]:
        """Claim, charge and admit; return the request's id, and its bell if it is new.

        Raises 409, 429 or 503 with nothing left behind.
        """
        request = job_id(ask.family, ulid(self.bus.clock.now_ms()))
        claimed = False
        if caller.idempotency_key:
            request = await self._claim(caller, request)
            claimed = True
        charge: Charge | None = None
        try:
            if caller.key is not None:
                charge = await self._charge(caller, caller.key, request, ask.charge_tokens)
            bell = await self._admit(caller, ask, request)
        except BusDown:
            # The job may be in: a retry under the same key attaches to it, so the claim stays.
            if charge is not None:
                self.background.spawn(self.keys.refund(charge))
            raise
        except SpillwayError:
            if charge is not None:
                await self.keys.refund(charge)
            if claimed:
                await Idempotency(self.bus).release(caller.tenant, caller.idempotency_key, request)
            raise
        if caller.resume_s > 0:
            await self.graces.hold(request, caller.resume_s, caller.deadline_ms)
        return request, bell

    async def attach(self, caller: RequestContext) -> str | None:
        """Return the request that the caller's idempotency key stands for, if it is still known; 409 for another body.

        It spares what `submit` would prepare in vain, and a session's next turn from being asked twice.
        """
        if not caller.idempotency_key:
            return None
        name = await Idempotency(self.bus).claimed(caller.tenant, caller.idempotency_key)
        if name is None or await self.bus.jobs.get(name) is None:
            return None
        claimed = await Idempotency(self.bus).claim(
            caller.tenant, caller.idempotency_key, caller.body_hash, name
        )
        if claimed != name:
            return None
        await self.take_over(name, caller.resume_s, caller.deadline_ms)
        return name

    async def take_over(self, request: str, resume_s: float, deadline_ms: int) -> None:
        """Make this router the one that answers for a request whose client came to it."""
        await self.bus.jobs.adopt(request, self.router)
        await self.note_reader(request)
        if resume_s > 0:
            await self.graces.hold(request, resume_s, deadline_ms)

    async def _claim(self, caller: RequestContext, request: str) -> str:
        claimed = await Idempotency(self.bus).claim(
            caller.tenant, caller.idempotency_key, caller.body_hash, request
        )
        if family_of(claimed).name.split(".")[0] != family_of(request).name.split(".")[0]:
            raise Conflict(
                "Idempotency-Key was used for another kind of request", code="idempotency_conflict"
            )
        return claimed

    async def _charge(
        self, caller: RequestContext, key: ApiKey, request: str, tokens: int
    ) -> Charge:
        try:
            return await self.keys.charge(key, request, tokens, caller.deadline_ms)
        except RateLimited as error:
            metrics.REFUSED.labels("quota").inc()
            error.retry_after_s = retry_after(error.retry_after_s or 1.0)
            raise

    async def _admit(
        self, caller: RequestContext, ask: JobSpec, request: str
    ) -> Subscription | None:
        family = family_of(request)
        self.families[family] = self.bus.clock.monotonic()
        bell = self.journal.bell(request, family)
        parcel, view, kept = ask.parcel, b"", False
        if not caller.attached or ask.view.stream:
            # A stream that broke off is continued from its view, whoever holds it.
            view = encode_options(msgspec.structs.replace(ask.view, resume_s=caller.resume_s))
        try:
            prefer = await self._preferred(family, ask)
            admission = await self.bus.admission.admit(
                [NewJob(request, parcel.payload, parcel.items, parcel.tokens, view)],
                classes=self.policy.classes(ask.classes),
                terms=self.policy.terms(ask.classes),
                own=caller.own,
                share=caller.share,
                router=self.router,
                tenant=caller.tenant,
                deadline_ms=caller.deadline_ms,
                prefer=prefer.worker,
                value_s=prefer.value_s,
                session=ask.session,
                version=ask.version,
            )
            kept = admission.outcome == "admitted"
        finally:
            if not kept:
                bell.close()
        if admission.outcome == "refused":
            if caller.deadline_ms <= self.bus.clock.now_ms():
                raise DeadlineExceeded("the deadline passed before the request could be admitted")
            raise refusal(admission.reason, admission.retry_after_s)
        if admission.outcome == "exists":
            await self.bus.jobs.adopt(request, self.router)
            return None
        metrics.ADMITTED.labels(lane_label(family, admission.lane)).inc()
        return bell

    async def _preferred(self, family: Family, ask: JobSpec) -> Preference:
        if own := self.prefer.get(family):
            return Preference(own, OWN_S)
        return await preferred(self.bus, family, ask.session, ask.marks, ask.view.tokens)

    async def foresee(
        self, family: Family, classes: Sequence[str], items: int, tokens: int, deadline_ms: int
    ) -> None:
        """Refuse a request of many jobs that all lanes together cannot finish before its deadline.

        Predicted from the costs workers publish and what their lanes hold; RateLimited `deadline`, or Unavailable.
        """
        workers = [w for w in await self.bus.workers.living(family) if not (w.draining or w.closed)]
        workers = [w for w in workers if set(w.classes) & set(classes)]
        if not workers:
            raise refusal("no_worker", 2.0)
        used = await self.bus.lanes.use(family)
        items += sum(used.get(cls, (0, 0))[0] for cls in classes)
        tokens += sum(used.get(cls, (0, 0))[1] for cls in classes)
        rate = sum(1.0 / max(_seconds(worker, items, tokens), 1e-9) for worker in workers)
        left_s = (deadline_ms - self.bus.clock.now_ms()) / 1000
        if 1.0 / rate > left_s:
            raise refusal("deadline", 1.0 / rate - left_s)


def _seconds(worker: WorkerRecord, items: int, tokens: int) -> float:
    return worker.beta_s + worker.alpha_items_s * items + worker.alpha_tokens_s * tokens
