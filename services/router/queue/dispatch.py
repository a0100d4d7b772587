"""The door: claims, quotas and admission of one request, and waiting for its outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from common import log
from common.bus import Bus, BusDown, Journal, NewJob
from common.bus.journal import Bell
from common.errors import (
    Conflict,
    DeadlineExceeded,
    RateLimited,
    SpillwayError,
)
from common.ids import Family, family_of, job_id, ulid
from common.keys import Charge, Key, KeyStore
from common.messages import Event, Result, WorkerRecord
from services.router import metrics
from services.router.background import Background
from services.router.queue.keeping import Keeping
from services.router.queue.outcomes import result_of
from services.router.queue.refusals import class_of, kind_of, refusal, retry_after
from services.router.text.asks import Parcel
from services.router.text.replies import View

EMBED_CLASSES = ("gpu", "cpu")
SEARCH_CLASSES = ("cpu",)
REQUEST_CLASSES = ("router",)
_log = log.get("router")


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, until when, and what is to happen when the connection goes."""

    tenant: str
    key: Key | None
    deadline_ms: int
    resume_s: float = 0.0
    idempotency_key: str = ""
    body_hash: bytes = b""

    @property
    def attached(self) -> bool:
        """True if a disconnect cancels the request."""
        return self.resume_s <= 0 and not self.idempotency_key


class Ask(NamedTuple):
    """One job that is a request: where it goes, what it holds, and how its result is shown."""

    family: Family
    classes: Sequence[str]
    parcel: Parcel
    view: View
    charge_tokens: int = 0


class Dispatch(Keeping):
    """Admits requests and waits for them; one a router."""

    def __init__(
        self, bus: Bus, journal: Journal, key_store: KeyStore, background: Background
    ) -> None:
        super().__init__(bus)
        self.journal, self.keys = journal, key_store
        self.background = background
        self.router = journal.router
        self.prefer: dict[Family, str] = {}
        self.families: dict[Family, float] = {}
        self.draining = False
        self.on_flagged: Callable[[], None] = lambda: None
        self._readers: dict[str, int] = {}

    # -- the door --------------------------------------------------------------------------------------

    async def submit(self, caller: Caller, ask: Ask) -> tuple[str, Bell | None]:
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
                await self.bus.unclaim(caller.tenant, caller.idempotency_key, request)
            raise
        if not caller.attached:
            await self.keep_view(request, ask.view, caller.deadline_ms)
        metrics.TOKENS.labels(ask.view.model, "input").inc(ask.charge_tokens)
        return request, bell

    async def _claim(self, caller: Caller, request: str) -> str:
        claimed = await self.bus.claim(
            caller.tenant, caller.idempotency_key, caller.body_hash, request
        )
        if family_of(claimed).name.split(".")[0] != family_of(request).name.split(".")[0]:
            raise Conflict(
                "Idempotency-Key was used for another kind of request", code="idempotency_conflict"
            )
        return claimed

    async def _charge(self, caller: Caller, key: Key, request: str, tokens: int) -> Charge:
        try:
            return await self.keys.charge(key, request, tokens, caller.deadline_ms)
        except RateLimited as error:
            metrics.REFUSED.labels("quota").inc()
            error.retry_after_s = retry_after(error.retry_after_s or 1.0)
            raise

    async def _admit(self, caller: Caller, ask: Ask, request: str) -> Bell | None:
        family = family_of(request)
        self.families[family] = self.bus.clock.monotonic()
        bell = self.journal.bell(request, family)
        kept = False
        try:
            admission = await self.bus.admit(
                [NewJob(request, ask.parcel.payload, ask.parcel.items, ask.parcel.tokens)],
                classes=ask.classes,
                router=self.router,
                tenant=caller.tenant,
                deadline_ms=caller.deadline_ms,
                prefer=self.prefer.get(family),
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
            await self.bus.adopt(request, self.router)
            return None
        metrics.ADMITTED.labels(kind_of(family), class_of(admission.lane)).inc()
        return bell

    async def foresee(
        self, family: Family, classes: Sequence[str], items: int, tokens: int, deadline_ms: int
    ) -> None:
        """Refuse a request of many jobs that all lanes together cannot finish before its deadline.

        Predicted from the costs workers publish and what their lanes hold; RateLimited `deadline`, or Unavailable.
        """
        workers = [w for w in await self.bus.workers(family) if not w.draining]
        workers = [w for w in workers if set(w.classes) & set(classes)]
        if not workers:
            raise refusal("no_worker", 2.0)
        used = await self.bus.use(family)
        items += sum(used.get(cls, (0, 0))[0] for cls in classes)
        tokens += sum(used.get(cls, (0, 0))[1] for cls in classes)
        rate = sum(1.0 / max(_seconds(worker, items, tokens), 1e-9) for worker in workers)
        left_s = (deadline_ms - self.bus.clock.now_ms()) / 1000
        if 1.0 / rate > left_s:
            raise refusal("deadline", 1.0 / rate - left_s)

    # -- the outcome -----------------------------------------------------------------------------------

    async def run(
        self, caller: Caller, ask: Ask, named: Callable[[str], None] | None = None
    ) -> tuple[str, Result]:
        """Submit a request and return its id and result, or raise its error; a disconnect cancels it if attached.

        `named` is told the id as soon as the request is accepted.
        """
        submitted = asyncio.create_task(self.submit(caller, ask))
        try:
            request, bell = await asyncio.shield(submitted)
            if named is not None:
                named(request)
            event = await self.wait(request, caller.deadline_ms, bell)
        except asyncio.CancelledError:
            self.background.spawn(self._abandon(submitted, caller))
            raise
        if caller.key is not None and caller.key.concurrency:
            self.background.spawn(self.keys.leave(caller.key, request))
        if caller.idempotency_key and event.kind != "result" and event.index >= 0:
            # It ended without a result: the next try under this key is a new request, not the same failure again.
            with contextlib.suppress(BusDown):
                await self.bus.unclaim(caller.tenant, caller.idempotency_key, request)
        lane = kind_of(family_of(request))
        metrics.OUTCOMES.labels(lane, "ok" if event.kind == "result" else event.kind).inc()
        return request, result_of(event)

    async def wait(self, request: str, deadline_ms: int, bell: Bell | None = None) -> Event:
        """Return a request's outcome; counts as a reader of it while waiting."""
        self._readers[request] = self._readers.get(request, 0) + 1
        try:
            return await self.journal.end(request, deadline_ms, bell)
        finally:
            self._readers[request] -= 1
            if self._readers[request] == 0:
                del self._readers[request]

    async def _abandon(
        self, submitted: asyncio.Task[tuple[str, Bell | None]], caller: Caller
    ) -> None:
        try:
            request, bell = await submitted
        except SpillwayError:
            return
        if bell is not None:
            bell.close()
        if caller.key is not None:
            await self.keys.leave(caller.key, request)
        if self.draining or (caller.idempotency_key and caller.resume_s <= 0):
            return  # a router that stops is not a client that left
        if caller.resume_s > 0:
            await asyncio.sleep(caller.resume_s)
            if request in self._readers or await self.seen(request, caller.resume_s):
                return
        verdict = await self.cancel(request)
        _log.info("request_abandoned", request_id=request, verdict=verdict)

    async def cancel(self, request: str) -> str:
        """Cancel a request: "removed", "flagged", "over" or "unknown"."""
        verdict = await self.bus.cancel(request)
        if verdict == "flagged":
            self.on_flagged()
        return verdict

    def delivered(self, caller: Caller, request: str, jobs: Sequence[str] = ()) -> None:
        """Let what an attached request left on the bus go soon: its client has the result."""
        if caller.attached:
            self.deliver(request, jobs)


def _seconds(worker: WorkerRecord, items: int, tokens: int) -> float:
    return worker.beta_s + worker.alpha_items_s * items + worker.alpha_tokens_s * tokens
