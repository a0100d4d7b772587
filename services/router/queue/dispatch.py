"""The door: claims, quotas and admission of one request, and waiting for its outcome."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec

from common import log
from common.bus import Bus, BusDown, BusFull, Journal, NewJob, keys
from common.bus.journal import Bell
from common.errors import (
    Conflict,
    DeadlineExceeded,
    NotFound,
    RateLimited,
    SpillwayError,
    Unavailable,
)
from common.ids import Family, family_of, job_id, ulid
from common.keys import Charge, Key, KeyStore
from common.messages import Event, Result, WorkerRecord
from services.router import metrics
from services.router.queue.outcomes import result_of
from services.router.text.asks import Parcel
from services.router.text.replies import View

EMBED_CLASSES = ("gpu", "cpu")
SEARCH_CLASSES = ("cpu",)
REQUEST_CLASSES = ("router",)
DELIVERED_S = 30.0
AFTER_S = 600
_SWEPT_KEYS = 400
_MOST_DELIVERED = 500_000
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


class Background:
    """Tasks nobody awaits, kept and logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` to its end; an error is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = _log.warning if isinstance(error, BusDown) else _log.error
            level("background_failed", error=repr(error))

    async def stop(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def retry_after(seconds: float) -> float:
    """Return a computed wait, clamped to 1..60 s and jittered so that refused clients do not return at once."""
    return float(min(60, max(1, math.ceil(seconds * random.uniform(1.0, 1.3)))))


def refusal(reason: str, retry_after_s: float) -> SpillwayError:
    """Return the error of a refused admission."""
    metrics.REFUSED.labels(reason).inc()
    wait = retry_after(retry_after_s)
    if reason == "no_worker":
        return Unavailable(
            "no worker of this kind is up; try again", code="no_worker", retry_after_s=wait
        )
    if reason == "bus_full":
        return BusFull("the bus is full; running work goes on, try again later", retry_after_s=wait)
    sentences = {
        "depth": "every lane holds as many items as it can finish in time",
        "tokens": "every lane holds as many tokens as it can finish in time",
        "deadline": "no lane could finish this before its deadline",
    }
    return RateLimited(
        f"busy: {sentences.get(reason, reason)}; come back after Retry-After",
        code=reason,
        retry_after_s=wait,
    )


class Dispatch:
    """Admits requests and waits for them; one a router."""

    def __init__(
        self, bus: Bus, journal: Journal, key_store: KeyStore, background: Background
    ) -> None:
        self.bus, self.journal, self.keys = bus, journal, key_store
        self.background = background
        self.router = journal.router
        self.prefer: dict[Family, str] = {}
        self.families: dict[Family, float] = {}
        self.draining = False
        self.on_flagged: Callable[[], None] = lambda: None
        self._readers: dict[str, int] = {}
        self._delivered: deque[tuple[float, str]] = deque(maxlen=_MOST_DELIVERED)

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
        except SpillwayError:
            if charge is not None:
                await self.keys.refund(charge)
            if claimed:
                await self.bus.unclaim(caller.tenant, caller.idempotency_key, request)
            raise
        if not caller.attached:
            await self._keep_view(request, ask.view, caller.deadline_ms)
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
        metrics.ADMITTED.labels(family.name, admission.lane).inc()
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

    async def run(self, caller: Caller, ask: Ask) -> tuple[str, Result]:
        """Submit a request and return its id and result, or raise its error; a disconnect cancels it if attached."""
        submitted = asyncio.create_task(self.submit(caller, ask))
        try:
            request, bell = await asyncio.shield(submitted)
            event = await self.wait(request, caller.deadline_ms, bell)
        except asyncio.CancelledError:
            self.background.spawn(self._abandon(submitted, caller))
            raise
        if caller.key is not None and caller.key.concurrency:
            self.background.spawn(self.keys.leave(caller.key, request))
        lane = family_of(request).name
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

    async def note_reader(self, request: str) -> None:
        """Remember that somebody came back for a request, at whichever router."""
        await self.bus.call("SET", _key(request, "seen"), self.bus.clock.now_ms(), "EX", AFTER_S)

    async def seen(self, request: str, within_s: float) -> bool:
        """Return whether somebody came back for a request within the last `within_s`."""
        raw = await self.bus.call("GET", _key(request, "seen"))
        return raw is not None and self.bus.clock.now_ms() - int(raw) <= within_s * 1000

    def delivered(self, caller: Caller, request: str, jobs: Sequence[str] = ()) -> None:
        """Let what an attached request left on the bus go soon: its client has the result."""
        if caller.attached:
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
            by_family.setdefault(family_of(job), []).extend((keys.log(job), keys.job(job)))
        for names in by_family.values():
            for first in range(0, len(names), _SWEPT_KEYS):
                await self.bus.call("UNLINK", *names[first : first + _SWEPT_KEYS])

    # -- views: how a request that may be asked for later wants its result shown -------------------------

    async def _keep_view(self, request: str, view: View, deadline_ms: int) -> None:
        ttl_ms = max(deadline_ms - self.bus.clock.now_ms(), 0) + AFTER_S * 1000
        await self.bus.call(
            "SET", _key(request, "view"), msgspec.msgpack.encode(view), "PX", ttl_ms
        )

    async def view(self, request: str) -> View | None:
        """Return how a request's result is to be shown, if that was kept."""
        raw = await self.bus.call("GET", _key(request, "view"))
        return None if raw is None else msgspec.msgpack.decode(raw, type=View)

    async def owned(self, request: str, tenant: str) -> None:
        """Check that a request exists and is the tenant's; NotFound otherwise."""
        try:
            family_of(request)
        except ValueError:
            raise _no_request(request) from None
        state = await self.bus.job(request)
        if state is None or state.tenant != tenant:
            raise _no_request(request)


def _seconds(worker: WorkerRecord, items: int, tokens: int) -> float:
    return worker.beta_s + worker.alpha_items_s * items + worker.alpha_tokens_s * tokens


def _key(request: str, what: str) -> str:
    return "{" + str(family_of(request)) + "}:" + what + ":" + request


def _no_request(request: str) -> NotFound:
    return NotFound(
        f"no request {request[:120]!r}: unknown, or expired ten minutes after its deadline",
        code="request_not_found",
    )
