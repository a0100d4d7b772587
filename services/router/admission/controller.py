"""Admission: claims, charges and admits requests, or refuses them and undoes claim and charge; admits jobs to lanes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from common.bus import Admission, Bus, BusDown, NewJob, Notifications
from common.bus.events import Subscription
from common.bus.metrics import lane_label
from common.errors import Conflict, DeadlineExceeded, RateLimited, SpillwayError
from common.ids import Family, family_of, job_id, ulid
from common.registry.api_keys import ApiKey
from common.registry.idempotency import Idempotency
from common.registry.quotas import Charge, Quotas
from common.wire.registry import WorkerRecord
from common.wire.workflows import encode_options
from services.router import metrics
from services.router.admission.affinity import Preference, preferred
from services.router.admission.job_spec import NO_PROMPT, JobSpec, Prompt, RequestContext
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import LanePolicy
from services.router.admission.queue import AdmissionQueue
from services.router.admission.refusals import refusal, retry_after
from services.router.admission.request_store import RequestStore

T = TypeVar("T")
OWN_S = 3600.0  # the value of running a workflow on the router that accepted its request


class AdmissionController:
    """Accepts requests and submits jobs to lanes; one per router, and the only caller of `bus.admission`.

    `draining` tells the HTTP side to refuse new requests.
    """

    def __init__(
        self,
        bus: Bus,
        notifications: Notifications,
        quotas: Quotas,
        policy: LanePolicy,
        queue: AdmissionQueue,
        store: RequestStore,
        orphans: OrphanReaper,
    ) -> None:
        self.policy, self.router, self.draining = policy, notifications.router, False
        self._bus, self._notifications, self._quotas = bus, notifications, quotas
        self.queue, self._store, self._orphans = queue, store, orphans
        self._own_consumers: dict[Family, str] = {}
        self._used: dict[Family, float] = {}

    def prefer(self, family: Family, consumer: str) -> None:
        """Prefer this router's own lane, the lane of `consumer`, for the requests of a family from now on."""
        self._own_consumers[family] = consumer

    def used_within(self, seconds: float) -> list[Family]:
        """Return the families to which jobs were submitted within the last `seconds`, the latest first."""
        now = self._bus.clock.monotonic()
        self._used = {family: at for family, at in self._used.items() if now - at <= seconds}
        return sorted(self._used, key=lambda family: -self._used[family])

    # -- requests ------------------------------------------------------------------------------------------

    async def accept(
        self, caller: RequestContext, spec: JobSpec
    ) -> tuple[str, Subscription | None]:
        """Claim, charge and admit a request; return its id, and the subscription to its job if the job is new.

        A refusal (404, 409, 429, 503, 504) undoes the claim and the charge; after BusDown the claim stays.
        """
        request = job_id(spec.family, ulid(self._bus.clock.now_ms()))
        if caller.idempotency_key:
            request = await self._claim(caller, request)
        charge: Charge | None = None
        try:
            if caller.key is not None:
                charge = await self._charge(caller, caller.key, request, spec.charge_tokens)
            subscription = await self._admit(caller, spec, request)
        except BusDown:
            # The job may have been admitted: the claim stays, so that a retry under the same key attaches to the job.
            if charge is not None:
                self._bus.supervisor.spawn(self._quotas.refund(charge), "refund")
            raise
        except SpillwayError:
            if charge is not None:
                await self._quotas.refund(charge)
            if caller.idempotency_key:
                await Idempotency(self._bus).release(caller.tenant, caller.idempotency_key, request)
            raise
        if caller.resume_s > 0:
            await self._orphans.hold(request, caller.resume_s, caller.deadline_ms)
        return request, subscription

    async def read(
        self,
        caller: RequestContext,
        family: Family,
        request: str,
        ask: Callable[[], Awaitable[T | None]],
    ) -> T | None:
        """Charge a read of a family that needs no job, and return the result of `ask`; None costs nothing."""
        if caller.key is None:
            found = await ask()
        else:
            found = await self._charged_read(caller, caller.key, request, ask)
        if found is not None:
            self.count_read(family)
        return found

    def count_read(self, family: Family) -> None:
        """Count a read of a family that needed no job."""
        self._used[family] = self._bus.clock.monotonic()
        metrics.admitted(lane_label(family, "call")).inc()

    async def _charged_read(
        self,
        caller: RequestContext,
        key: ApiKey,
        request: str,
        ask: Callable[[], Awaitable[T | None]],
    ) -> T | None:
        charge = await self._charge(caller, key, request, 0)
        try:
            found = await ask()
        except BaseException:
            self._bus.supervisor.spawn(self._quotas.leave(key, request), "end a read")
            raise
        if found is None:
            await self._quotas.refund(charge)
        else:
            self._bus.supervisor.spawn(self._quotas.leave(key, request), "end a read")
        return found

    async def attach(self, caller: RequestContext) -> str | None:
        """Return the known request of the caller's idempotency key, or None; Conflict (409) for another body.

        Attach before preparing: a repeated request then costs no preparation, and its session gets no second turn.
        """
        if not caller.idempotency_key:
            return None
        claims = Idempotency(self._bus)
        name = await claims.claimed(caller.tenant, caller.idempotency_key)
        if name is None or await self._bus.jobs.get(name) is None:
            return None
        claimed = await claims.claim(caller.tenant, caller.idempotency_key, caller.body_hash, name)
        if claimed != name:
            return None
        await self.take_over(name, caller.resume_s, caller.deadline_ms)
        return name

    async def take_over(self, request: str, resume_s: float, deadline_ms: int) -> None:
        """Make this router responsible for a request whose client came to this router."""
        await self._bus.jobs.adopt(request, self.router)
        await self._store.note_reader(request)
        if resume_s > 0:
            await self._orphans.hold(request, resume_s, deadline_ms)

    async def foresee(
        self, family: Family, classes: Sequence[str], items: int, tokens: int, deadline_ms: int
    ) -> None:
        """Refuse a request of many jobs that all lanes together cannot finish before its deadline.

        The prediction uses the costs that workers publish and the work in their lanes. Raises RateLimited `deadline`,
        or Unavailable `no_worker`.
        """
        workers = [
            worker
            for worker in await self._bus.workers.living(family)
            if not (worker.draining or worker.closed) and set(worker.classes) & set(classes)
        ]
        if not workers:
            raise refusal("no_worker", 2.0)
        used = await self._bus.lanes.use(family)
        items += sum(used.get(cls, (0, 0))[0] for cls in classes)
        tokens += sum(used.get(cls, (0, 0))[1] for cls in classes)
        rate = sum(1.0 / max(_seconds(worker, items, tokens), 1e-9) for worker in workers)
        left_s = (deadline_ms - self._bus.clock.now_ms()) / 1000
        if 1.0 / rate > left_s:
            raise refusal("deadline", 1.0 / rate - left_s)

    async def _claim(self, caller: RequestContext, request: str) -> str:
        claimed = await Idempotency(self._bus).claim(
            caller.tenant, caller.idempotency_key, caller.body_hash, request
        )
        if family_of(claimed).kind != family_of(request).kind:
            raise Conflict(
                "Idempotency-Key was used for another kind of request", code="idempotency_conflict"
            )
        return claimed

    async def _charge(
        self, caller: RequestContext, key: ApiKey, request: str, tokens: int
    ) -> Charge:
        try:
            return await self._quotas.charge(key, request, tokens, caller.deadline_ms)
        except RateLimited as error:
            metrics.REFUSED.labels("quota").inc()
            error.retry_after_s = retry_after(error.retry_after_s or 1.0)
            raise

    async def _admit(
        self, caller: RequestContext, spec: JobSpec, request: str
    ) -> Subscription | None:
        """Submit a request's job; return the subscription to a new job, None if the job exists; raise a refusal."""
        parcel, view = spec.parcel, b""
        shaped = spec.view.shapes_vectors or spec.view.marks or spec.view.asked
        if not caller.attached or spec.view.stream or shaped:
            # Any router must be able to continue a broken stream, and to show a result, in the format of the request.
            options = msgspec.structs.replace(spec.view, resume_s=caller.resume_s)
            view = encode_options(options)
        job = NewJob(request, parcel.payload, parcel.items, parcel.tokens, view)
        subscription = self._notifications.bell(request, family_of(request))
        admitted = False
        try:
            admission = await self.submit(
                caller, [job], spec.classes, prompt=spec.prompt, came_ms=caller.came_ms
            )
            admitted = admission.outcome == "admitted"
        finally:
            if not admitted:
                subscription.close()
        if admission.outcome == "refused":
            if caller.deadline_ms <= self._bus.clock.now_ms():
                raise DeadlineExceeded("the deadline passed before the request could be admitted")
            raise refusal(admission.reason, admission.retry_after_s)
        return subscription if admitted else None

    # -- jobs ------------------------------------------------------------------------------------------------

    async def submit(
        self,
        caller: RequestContext,
        jobs: Sequence[NewJob],
        classes: Sequence[str],
        *,
        prompt: Prompt = NO_PROMPT,
        origin: str = "",
        spread: bool = False,
        waits: bool = False,
        came_ms: int = 0,
    ) -> Admission:
        """Admit `jobs`, all of one family, to lanes of `classes`, or refuse them all; adopt a job that exists.

        `prompt` is a generation's prompt, or QUESTION; `origin` is the request to which the stage of these jobs
        belongs. With `spread` each job may take another lane; with `waits` a refusal asks for a notification when there
        is room. A lane's objective counts from `came_ms` (0: from now). Raises BusDown.
        """
        family = family_of(jobs[0].id)
        self._used[family] = self._bus.clock.monotonic()
        prefer = await self._preferred(family, classes, prompt)
        admission = await self._bus.admission.admit(
            jobs,
            classes=self.policy.classes(classes),
            terms=self.policy.terms(classes),
            own=caller.own,
            share=caller.share,
            router=self.router,
            tenant=caller.tenant,
            deadline_ms=caller.deadline_ms,
            prefer=prefer.worker,
            value_s=prefer.value_s,
            session=prompt.session,
            version=prompt.version,
            origin=origin,
            spread=spread,
            waits=waits,
            came_ms=came_ms,
        )
        await self._note(jobs, admission)
        return admission

    async def _preferred(
        self, family: Family, classes: Sequence[str], prompt: Prompt
    ) -> Preference:
        if own := self._own_consumers.get(family):
            return Preference(own, OWN_S)
        return await preferred(self._bus, family, self.policy.classes(classes), prompt)

    async def _note(self, jobs: Sequence[NewJob], admission: Admission) -> None:
        """Adopt jobs that exist; count admitted jobs by lane, read from their records if there are several."""
        if admission.outcome == "refused":
            return
        if admission.outcome == "exists":
            for job in jobs:
                await self._bus.jobs.adopt(job.id, self.router)
            return
        if len(jobs) == 1:
            metrics.admitted(lane_label(family_of(jobs[0].id), admission.lane)).inc()
            return
        for job in jobs:
            if (state := await self._bus.jobs.get(job.id)) is not None:
                metrics.admitted(lane_label(family_of(job.id), state.lane)).inc()


def _seconds(worker: WorkerRecord, items: int, tokens: int) -> float:
    return worker.beta_s + worker.alpha_items_s * items + worker.alpha_tokens_s * tokens
