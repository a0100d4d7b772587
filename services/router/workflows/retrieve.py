"""The stages that find the passages of a grounded answer: rewrite the question, search, rerank the hits.

Rewriting and reranking run where a chat asks for them. Every stage's job id is a function of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from common.bus import Bus
from common.wire.results import GenerateResult, ScoreResult, decode_delta
from common.wire.search import Hit
from common.wire.workflows import GroundPlan, SearchRequest
from services.router.admission.policy import EMBED_CLASSES, GENERATE_CLASSES
from services.router.text import rewrites
from services.router.text.bodies import RequestLimits
from services.router.text.grounded import best, searching
from services.router.text.requests import Parcel, score_parcels
from services.router.workflows.embed import encoder_of
from services.router.workflows.search import find
from services.router.workflows.workflow import Workflow

REWRITE_STAGE, RERANK_STAGE = "rewrite", "rerank"


class Retrieved(NamedTuple):
    """The hits of each query, the search that found them, and the response's fields about rewriting and reranking."""

    hits: list[list[Hit]]
    search: SearchRequest
    told: dict[str, Any]


class _Asked(NamedTuple):
    """A search, the query's text for the reranker, and the response's fields about the rewriting."""

    search: SearchRequest
    query: str
    told: dict[str, Any]


async def retrieve(workflow: Workflow, plan: GroundPlan) -> Retrieved:
    """Return the collection's hits for a chat's last question."""
    asked = await _rewrite(workflow, plan)
    found = await find(workflow, plan.collection, asked.search, plan.parcel, plan.queries)
    retrieval = plan.chat.retrieval
    if retrieval is None or retrieval.rerank is None:
        return Retrieved(found.hits, asked.search, asked.told)
    candidates = best(plan.chat, found.hits, retrieval.rerank.candidates)
    with workflow.timeline.stage(RERANK_STAGE):
        hits, told = await _rerank(workflow, plan, asked.query, candidates)
    return Retrieved([hits[: retrieval.k]], asked.search, asked.told | {"rerank": told})


async def _rewrite(workflow: Workflow, plan: GroundPlan) -> _Asked:
    """Return the search for a chat's question or, if the chat asks for that, for the question rewritten by a model."""
    retrieval = plan.chat.retrieval
    query = plan.asked[-1] if plan.asked else plan.chat.messages[-1]["content"]
    if retrieval is None or retrieval.rewrite is None or len(plan.asked) < 2:
        return _Asked(plan.search, query, {})
    ruled = _Asked(plan.search, query, {"rewrite": {"by": "rule", "query": query}})
    if plan.rewriting is None:
        return ruled
    model = retrieval.rewrite.model
    with workflow.timeline.stage(REWRITE_STAGE):
        family = await workflow.context.cards.family(model, workflow.request)
        jobs, [result] = await workflow.gather(
            REWRITE_STAGE, [family], GENERATE_CLASSES, [Parcel(*plan.rewriting)]
        )
        written = rewrites.read(await _said(workflow.context.bus, jobs[0]))
    used = cast("GenerateResult", result)
    tokens = {
        "model": model,
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
    }
    if written is None:
        return ruled._replace(told={"rewrite": ruled.told["rewrite"] | tokens})
    encoder = await encoder_of(workflow, plan.collection)
    prompt = plan.collection.query_prompt
    call = partial(searching, plan.search, [plan.asked[0], written], encoder, prompt)
    search = await workflow.context.pool.run(call)
    return _Asked(search, written, {"rewrite": {"by": "model", "query": written, **tokens}})


async def _said(bus: Bus, job: str) -> str:
    """Return the text of an ended generate job, which has one choice."""
    log = await bus.jobs.log(job)
    deltas = [decode_delta(event.data) for event in log if event.kind == "progress"]
    return "".join(piece.text for delta in deltas for piece in delta.pieces)


async def _rerank(
    workflow: Workflow, plan: GroundPlan, query: str, candidates: Sequence[Hit]
) -> tuple[list[Hit], dict[str, Any]]:
    """Return hits in the order of the cross-encoder's scores, and the response's fields about the reranking."""
    assert plan.chat.retrieval is not None
    assert plan.chat.retrieval.rerank is not None
    cards, model = workflow.context.cards, plan.chat.retrieval.rerank.model
    told = {"model": model, "candidates": len(candidates), "tokens": 0}
    if not candidates:
        return [], told
    spec, card = await cards.cross_encoder(model), await cards.card(model)
    families = [
        await cards.family(model, workflow.request, at) for at in range(max(1, card.partitions))
    ]
    limits = RequestLimits(len(candidates), 1 << 40, *plan.parcel)
    texts = [hit.text or "" for hit in candidates]
    call = partial(score_parcels, spec, query, texts, limits, truncate=True, param="messages")
    parcels = await workflow.context.pool.run(call)
    _, results = await workflow.gather(RERANK_STAGE, families, EMBED_CLASSES, parcels)
    scored = [cast("ScoreResult", result) for result in results]
    scores = [score for result in scored for score in result.scores]
    told["tokens"] = sum(result.tokens for result in scored)
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return [msgspec.structs.replace(candidates[at], score=scores[at]) for at in order], told
