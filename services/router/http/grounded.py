"""Grounded chats: a chat that asks for retrieval becomes a request of a few jobs, or is refused before any job runs."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from aiohttp import web

from common.bus import Bus, Notifications
from common.bus.events import Subscription
from common.cost.linear import LinearCost
from common.errors import InvalidRequest
from common.ids import Family, family_of
from common.registry.collections import Collections
from common.wire.registry import CollectionRecord
from common.wire.results import Event
from common.wire.workflows import (
    ChatRequest,
    GroundPlan,
    ResponseOptions,
    RetrievalOptions,
    SearchRequest,
)
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import SEARCH_CLASSES
from services.router.admission.refusals import refusal
from services.router.admission.request_runner import RequestRunner
from services.router.cards import Cards
from services.router.http.answers import AnswerWriter, ReaderAnswer
from services.router.http.generations import Generations
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.records import no_collection
from services.router.http.session_turns import SessionTurns
from services.router.mesh.lane_depths import LaneDepths
from services.router.responses.answer_sources import AnswerSource, AnswerSources
from services.router.responses.outcomes import error_of
from services.router.text.chats import marks_of
from services.router.text.collections import depth_of
from services.router.text.grounded import GroundedQuestion, question_of
from services.router.text.intervals import WINDOW, RetrievalMargin, smallest_interval
from services.router.text.pool import TextPool
from services.router.text.requests import choose
from services.router.text.tokens import Spec
from services.router.workflows.embed import checked_encoder
from services.router.workflows.planned_jobs import PlannedJobs
from services.router.workflows.progress import await_grounded_progress
from services.router.workflows.search import QUERIES_AT_ONCE

# The longest wait of a stream's head for its generate job, so that an earlier refusal gets an HTTP status.
HOLD_S = 2.0


class GroundedChats:
    """Answers chats from collections: a workflow embeds, searches and generates, and the router answers the client."""

    def __init__(
        self,
        questions: GroundedQuestions,
        generations: Generations,
        runner: RequestRunner,
        notifications: Notifications,
        sources: AnswerSources,
        answers: AnswerWriter,
    ) -> None:
        self._questions, self._generations = questions, generations
        self._runner, self._notifications = runner, notifications
        self._sources, self._answers = sources, answers

    async def answer(
        self, request: web.Request, caller: RequestContext, chat: ChatRequest
    ) -> web.StreamResponse:
        """Answer a chat from a collection; raises an error that ends the request within HOLD_S."""
        spec = await self._questions.spec(caller, chat)
        name, subscription = await self._generations.accept(request, caller, spec)
        finding = asyncio.create_task(self._find(caller, name, subscription))
        try:
            await asyncio.wait({finding}, timeout=HOLD_S if chat.stream else None)
        except asyncio.CancelledError:
            finding.cancel()
            self._runner.left(caller, name)
            raise
        try:
            if finding.done():
                finding.result()
            answer = ReaderAnswer(caller, name, spec.view, lambda: asyncio.shield(finding))
            response = await self._answers.deliver(request, answer)
            if finding.done() and not finding.exception():
                self._runner.delivered(caller, finding.result().job)
            return response
        finally:
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)

    async def _find(
        self, caller: RequestContext, request: str, subscription: Subscription | None
    ) -> AnswerSource:
        """Return the answer's source; if the request ends before it has one, settle it and raise its error."""
        with self._runner.reading(request):
            progress = await await_grounded_progress(
                self._notifications, request, caller.deadline_ms, subscription
            )
        if isinstance(progress, Event):
            await self._runner.ended(caller, request, progress)
            raise error_of(progress)
        return await self._sources.generating(progress)


class GroundedQuestions:
    """Makes the job of a grounded chat, and refuses a chat that cannot be answered."""

    def __init__(
        self,
        bus: Bus,
        cards: Cards,
        pool: TextPool,
        turns: SessionTurns,
        limits: ParcelLimits,
        depths: LaneDepths,
        admission: AdmissionController,
        generations: Generations,
        planned: PlannedJobs,
        margin: RetrievalMargin,
    ) -> None:
        self._bus, self._cards, self._pool, self._turns = bus, cards, pool, turns
        self._limits, self._depths, self._admission = limits, depths, admission
        self._generations, self._planned = generations, planned
        self._collections, self._margin = Collections(bus), margin

    async def spec(self, caller: RequestContext, chat: ChatRequest) -> JobSpec:
        """Return the request that answers a chat from a collection.

        The following are refused: an unknown collection, a collection without an encoder or of another encoder than the
        one served, a conversation too long for the model, a model without workers, a `place` of passages that the
        model's template does not have, `precomputed` passages that its workers cannot place, and a search that no shard
        could finish in time.
        """
        retrieval = chat.retrieval
        assert retrieval is not None, "a chat without retrieval is one job"
        record = await self._collection(caller.tenant, retrieval.collection)
        specs = await self._cards.specs()
        encoder = checked_encoder(record, specs)
        generator = await self._served_generator(caller, chat, encoder)
        chat = await self._with_models(caller, chat)
        retrieval = chat.retrieval
        assert retrieval is not None
        _check_place(retrieval, specs[chat.model])
        _check_precomputed(retrieval, specs[chat.model])
        if retrieval.interval == "auto":
            interval = await self._interval(caller, record, generator, encoder)
            chat, retrieval = _every(chat, retrieval, interval)
        question = await self._question(caller, chat, specs[chat.model], encoder, record)
        family = self._bus.writes.search_family(record.id)
        fingerprint = (await self._cards.card(chat.model)).fingerprint
        options = _options(chat, question, fingerprint)
        # Refuse a generation that even an empty lane could not hold, before passages are added.
        tokens = self._generations.spec(generator, question.generation, options).charge_tokens
        count = len(question.tokens)
        await self._admission.foresee(family, SEARCH_CLASSES, count, 0, caller.deadline_ms)
        bounds = await self._limits.encoders()
        queries, _ = self._depths.of(family.name) or (QUERIES_AT_ONCE, 0)
        plan = GroundPlan(
            collection=record,
            search=_search(retrieval, question),
            asked=question.texts if retrieval.rewrite or retrieval.rerank else [],
            rewriting=question.rewriting.parcel if question.rewriting else None,
            parcel=(bounds.parcel_items, bounds.parcel_tokens),
            queries=queries,
            chat=chat,
            options=options,
        )
        tokens += await self._charge(caller, retrieval, question, record)
        return self._planned.spec(caller, "chat", plan, options, tokens)

    async def _with_models(self, caller: RequestContext, chat: ChatRequest) -> ChatRequest:
        """Return a chat whose retrieval names the models of its stages; models that are not served are refused."""
        retrieval = chat.retrieval
        assert retrieval is not None
        rewrite, rerank = retrieval.rewrite, retrieval.rerank
        if rewrite is not None:
            specs = await self._cards.specs()
            spec = choose(specs, rewrite.model or chat.model, "", ("generate",))
            rewrite = msgspec.structs.replace(rewrite, model=spec.name)
        if rerank is not None:
            spec = await self._cards.cross_encoder(rerank.model)
            rerank = msgspec.structs.replace(rerank, model=spec.name)
        for stage in (rewrite, rerank):
            if stage is None:
                continue
            if not await self._served(await self._cards.family(stage.model, caller.tenant)):
                raise refusal("no_worker", 2.0)
        retrieval = msgspec.structs.replace(retrieval, rewrite=rewrite, rerank=rerank)
        return msgspec.structs.replace(chat, retrieval=retrieval)

    async def _charge(
        self,
        caller: RequestContext,
        retrieval: RetrievalOptions,
        question: GroundedQuestion,
        record: CollectionRecord,
    ) -> int:
        """Return the tokens to charge for the stages before generation; passages to rerank count at their largest size.

        Unprocessable `exceeds_depth` if even an empty lane could not hold the rewriting.
        """
        tokens = sum(map(len, question.tokens))
        if retrieval.rewrite is not None and question.rewriting is not None:
            model = retrieval.rewrite.model
            family = await self._cards.family(model, caller.tenant)
            options = ResponseOptions(kind="chat", model=model)
            tokens += self._generations.spec(family, question.rewriting, options).charge_tokens
        if retrieval.rerank is not None:
            longest = (await self._cards.card(retrieval.rerank.model)).max_tokens
            pair = len(question.tokens[-1]) + record.chunking.max_tokens
            tokens += retrieval.rerank.candidates * min(longest, pair)
        return tokens

    async def _collection(self, tenant: str, name: str) -> CollectionRecord:
        record = await self._collections.get(tenant, name)
        if record is None:
            raise no_collection(name, "retrieval.collection")
        if record.model is None:
            raise InvalidRequest(
                f"collection {name!r} has no encoder (model is null), so a question cannot be searched for in it; "
                "name a collection that embeds texts",
                code="vectors_only",
                param="retrieval.collection",
            )
        return record

    async def _served_generator(
        self, caller: RequestContext, chat: ChatRequest, encoder: Spec
    ) -> Family:
        """Return the family of a chat's generator; Unavailable `no_worker` unless it and `encoder` have workers."""
        if chat.session:
            family = family_of(chat.session)
        else:
            family = await self._cards.family(chat.model, caller.tenant)
        for needed in (family, await self._cards.family(encoder.name, caller.tenant)):
            if not await self._served(needed):
                raise refusal("no_worker", 2.0)
        return family

    async def _interval(
        self, caller: RequestContext, record: CollectionRecord, generator: Family, encoder: Spec
    ) -> int:
        """Return the smallest interval that a retrieval is predicted to fit, by the costs that workers publish."""
        embeds = await self._cost(await self._cards.family(encoder.name, caller.tenant))
        searches = await self._cost(self._bus.writes.search_family(record.id))
        retrieval_s = embeds.seconds(1, WINDOW) + searches.seconds(1, 0) + self._margin.value_s
        return smallest_interval(retrieval_s, (await self._cost(generator)).beta_s)

    async def _cost(self, family: Family) -> LinearCost:
        """Return the cost of the fastest worker of a family."""
        records = (await self._bus.workers.records(family)).values()
        costs = [LinearCost(r.beta_s, r.alpha_items_s, r.alpha_tokens_s) for r in records]
        return min(costs, key=lambda cost: cost.seconds(1, WINDOW), default=LinearCost(0, 0, 0))

    async def _served(self, family: Family) -> bool:
        """Return whether a worker of a family lives, even if it has just started."""
        if await self._bus.workers.living(family):
            return True
        self._bus.workers.forget(family)
        return bool(await self._bus.workers.living(family))

    async def _question(
        self,
        caller: RequestContext,
        chat: ChatRequest,
        spec: Spec,
        encoder: Spec,
        record: CollectionRecord,
    ) -> GroundedQuestion:
        past = await self._turns.history(chat.session, caller.tenant) if chat.session else None
        earlier = await self._turns.earlier(chat.session) if chat.session else []
        options = chat.retrieval.rewrite if chat.retrieval is not None else None
        rewriter = (await self._cards.specs())[options.model] if options is not None else None
        return await self._pool.run(
            partial(question_of, chat, spec, past, encoder, record.query_prompt, earlier, rewriter)
        )


def _every(
    chat: ChatRequest, retrieval: RetrievalOptions, interval: int
) -> tuple[ChatRequest, RetrievalOptions]:
    """Return a chat and its retrieval with `interval` set."""
    retrieval = msgspec.structs.replace(retrieval, interval=interval)
    return msgspec.structs.replace(chat, retrieval=retrieval), retrieval


def _check_place(retrieval: RetrievalOptions, spec: Spec) -> None:
    """Refuse a `place` of passages if the model's own template decides the place."""
    if retrieval.place != "before" and spec.grounding_template:
        raise InvalidRequest(
            f"retrieval.place: {spec.name} has a template of its own; leave it out",
            code="unsupported",
            param="retrieval.place",
        )


def _check_precomputed(retrieval: RetrievalOptions, spec: Spec) -> None:
    """Refuse passages that are computed alone if a model's workers cannot put them into a prompt."""
    if retrieval.precomputed and not spec.precomputes:
        raise InvalidRequest(
            f"retrieval.precomputed: the workers of {spec.name} cannot put passages computed alone into a prompt, "
            "which takes keys that RoPE turns by the place alone, attention without windows, and no attention on the "
            "host; leave it out",
            code="unsupported",
            param="retrieval.precomputed",
        )


def _options(chat: ChatRequest, question: GroundedQuestion, fingerprint: str) -> ResponseOptions:
    return ResponseOptions(
        kind="chat",
        model=chat.model,
        tokens=question.generation.prompt_tokens,
        fingerprint=fingerprint,
        stream=chat.stream,
        include_usage=chat.include_usage,
        logprobs=chat.options.logprobs,
        session=chat.session,
        marks=marks_of(chat, question.generation),
    )


def _search(retrieval: RetrievalOptions, question: GroundedQuestion) -> SearchRequest:
    mode = retrieval.mode
    k = retrieval.k if retrieval.rerank is None else retrieval.rerank.candidates
    return SearchRequest(
        many=True,
        count=len(question.tokens),
        tokens=[] if mode == "text" else question.tokens,
        vectors=b"",
        k=k,
        filter=retrieval.filter,
        min_score=retrieval.min_score,
        include_text=True,
        include_metadata=True,  # where pages start
        mode=mode,
        texts=[] if mode == "vector" else question.texts,
        depth=depth_of(mode, k, retrieval.mmr),
        mmr=retrieval.mmr,
        effort=retrieval.effort,
    )
