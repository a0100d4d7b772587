"""Replies to requests whose result is one JSON body: run the job, and write its result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from aiohttp import web

from common.clock import Clock
from common.wire.results import Result
from common.wire.workflows import ParcelsPlan, RequestResult, ResponseOptions
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import EMBED_CLASSES, DeliveryLatency
from services.router.admission.request_runner import RequestRunner
from services.router.cards import Cards
from services.router.http.receiver import REQUEST_ID
from services.router.http.replies import reply
from services.router.responses.results import ResultWriter
from services.router.text.requests import Parcel
from services.router.workflows.planned_jobs import PlannedJobs


def noted(request: web.Request, name: str) -> None:
    """Record the id of an accepted request, for the response's head and for log lines."""
    request[REQUEST_ID] = name


class JobReplies:
    """Runs a request as one job, or as a workflow, and replies with the result."""

    def __init__(
        self, runner: RequestRunner, latency: DeliveryLatency, writer: ResultWriter, clock: Clock
    ) -> None:
        self._runner, self._latency, self._writer, self._clock = runner, latency, writer, clock

    async def run(
        self, request: web.Request, caller: RequestContext, spec: JobSpec
    ) -> tuple[str, Result]:
        """Run a job and return its id and result; the response carries the id as x-request-id."""
        return await self._runner.run(caller, spec, lambda name: noted(request, name))

    async def fetch(self, request: web.Request, caller: RequestContext, spec: JobSpec) -> Result:
        """Run a job and return its result, which the bus need not keep."""
        name, result = await self.run(request, caller, spec)
        self._runner.delivered(caller, name)
        return result

    async def reply(
        self, request: web.Request, caller: RequestContext, spec: JobSpec
    ) -> web.Response:
        """Run a job and reply with its result."""
        name, result = await self.run(request, caller, spec)
        began = self._clock.monotonic()
        body = await self._writer.json(name, result, spec.view)
        self._latency.replied.add(self._clock.monotonic() - began)
        jobs = list(result.jobs) if isinstance(result, RequestResult) else []
        self._runner.delivered(caller, name, jobs)
        return reply(body)


class ParcelReplies:
    """Runs the parcels of one request for an encoder: a single parcel as a job, several as a workflow."""

    def __init__(
        self,
        cards: Cards,
        admission: AdmissionController,
        planned: PlannedJobs,
        replies: JobReplies,
    ) -> None:
        self._cards, self._admission = cards, admission
        self._planned, self._replies = planned, replies
        self._turns = itertools.count(1)  # each request takes the next partition

    async def reply(
        self,
        request: web.Request,
        caller: RequestContext,
        kind: str,
        parcels: Sequence[Parcel],
        options: ResponseOptions,
        *,
        whole: bool = False,
    ) -> web.Response:
        """Run the parcels and reply with their results; `whole` admits all of them at once, or none."""
        model, tokens = options.model, options.tokens
        family = await self._cards.family(model, request.remote or "", next(self._turns))
        if len(parcels) == 1:
            single = JobSpec(family, EMBED_CLASSES, parcels[0], options, tokens)
            return await self._replies.reply(request, caller, single)
        items = sum(parcel.items for parcel in parcels)
        await self._admission.foresee(family, EMBED_CLASSES, items, tokens, caller.deadline_ms)
        packed = [(parcel.payload, parcel.items, parcel.tokens) for parcel in parcels]
        plan = ParcelsPlan(model, options, packed, whole=whole)
        spec = self._planned.spec(caller, kind, plan, options, tokens)
        return await self._replies.reply(request, caller, spec)
