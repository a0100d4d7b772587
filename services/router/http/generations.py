"""Generations: the steps that chats and completions share before the answer."""

from __future__ import annotations

from aiohttp import web

from common.bus.events import Subscription
from common.errors import Conflict, InvalidRequest, NotFound, Unprocessable
from common.ids import Family
from common.wire.workflows import ResponseOptions
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec, Prompt, RequestContext
from services.router.admission.policy import GENERATE_CLASSES
from services.router.admission.request_runner import RequestRunner
from services.router.http.answers import AnswerWriter, ReaderAnswer, last_position
from services.router.http.job_replies import noted
from services.router.mesh.lane_depths import LaneDepths
from services.router.responses.answer_sources import AnswerSources, own_job
from services.router.text.generations import GenerationSpec


class Generations:
    """Finds the request of an idempotency key, accepts new generations, and answers both."""

    def __init__(
        self,
        admission: AdmissionController,
        runner: RequestRunner,
        depths: LaneDepths,
        sources: AnswerSources,
        answers: AnswerWriter,
    ) -> None:
        self._admission, self._runner, self._depths = admission, runner, depths
        self._sources, self._answers = sources, answers

    async def attached(
        self, request: web.Request, caller: RequestContext
    ) -> web.StreamResponse | None:
        """Answer with the idempotency key's known request, from Last-Event-ID on; None if there is none yet.

        Last-Event-ID without such a request is refused: a new answer would not continue the old one.
        """
        position = last_position(request)
        name = await self._admission.attach(caller)
        if name is not None:
            options = await self._sources.options(name)
            if options is None:
                raise Conflict(
                    "Idempotency-Key was used for another kind of request",
                    code="idempotency_conflict",
                )
            source = self._sources.of(name)
            known = ReaderAnswer(caller, name, options, source, position, fresh=False)
            return await self._answers.deliver(request, known)
        if position is not None and caller.idempotency_key:
            raise NotFound(
                "Last-Event-ID: the request of this Idempotency-Key is unknown, failed or expired; send it anew "
                "without",
                code="request_not_found",
                param="Last-Event-ID",
            )
        if position is not None:
            raise InvalidRequest(
                "Last-Event-ID: expected together with the Idempotency-Key of the request it goes on with",
                code="invalid_header",
                param="Last-Event-ID",
            )
        return None

    def spec(self, family: Family, made: GenerationSpec, options: ResponseOptions) -> JobSpec:
        """Return the job to admit; Unprocessable `exceeds_depth` if even an empty lane could not hold it."""
        items, tokens = self._depths.of(family.name) or (0, 0)
        if items and (made.parcel.items > items or made.parcel.tokens > tokens):
            raise Unprocessable(
                f"this asks for {made.parcel.items} choices and {made.parcel.tokens} tokens at once: "
                f"{options.model}'s workers take at most {items} and {tokens} in time; ask for fewer choices, prompts "
                "or max_tokens",
                code="exceeds_depth",
            )
        prompt = Prompt(made.session, made.version, made.marks, made.prompt_tokens)
        parcel = made.parcel
        return JobSpec(family, GENERATE_CLASSES, parcel, options, parcel.tokens, prompt)

    async def accept(
        self, request: web.Request, caller: RequestContext, spec: JobSpec
    ) -> tuple[str, Subscription | None]:
        """Accept a generation; return its id, and the subscription to its job if the job is new."""
        return await self._runner.open(caller, spec, lambda name: noted(request, name))

    async def deliver(
        self,
        request: web.Request,
        caller: RequestContext,
        spec: JobSpec,
        accepted: tuple[str, Subscription | None],
    ) -> web.StreamResponse:
        """Answer an accepted generation that is its own generate job."""
        name, subscription = accepted
        answer = ReaderAnswer(caller, name, spec.view, own_job(name, subscription))
        return await self._answers.deliver(request, answer)
