"""Planned jobs: each request of several jobs is itself one job, which a router's workflow runner leases."""

from __future__ import annotations

import itertools

from common.errors import TooLarge
from common.wire.message import encode
from common.wire.workflows import Plan, RequestWork, ResponseOptions, encode_plan
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import REQUEST_CLASSES, request_families
from services.router.text.requests import Parcel


class PlannedJobs:
    """Makes the job of a plan, in each partition of the family `request` in turn."""

    def __init__(self, partitions: int) -> None:
        self._families = itertools.cycle(request_families(partitions))

    def spec(
        self,
        caller: RequestContext,
        kind: str,
        plan: Plan,
        options: ResponseOptions,
        tokens: int = 0,
    ) -> JobSpec:
        """Return the job of a plan; `tokens` are charged to the key. TooLarge if the plan exceeds one message."""
        work = RequestWork(
            kind=kind, tenant=caller.tenant, body=encode_plan(plan), attached=caller.attached
        )
        try:
            payload = encode(work)
        except ValueError as error:
            raise TooLarge(f"the request is too large: {error}; split it") from None
        parcel = Parcel(payload, 1, 0)
        return JobSpec(next(self._families), REQUEST_CLASSES, parcel, options, tokens)
