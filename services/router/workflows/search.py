"""The stages of a search: embed the questions, search every shard, merge the hits."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import cast

import msgspec

from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import SearchReport, SearchResult, SearchWork, effort_of
from common.wire.workflows import RequestResult, ResponseOptions, SearchPlan, SearchRequest
from services.router.admission.policy import SEARCH_CLASSES
from services.router.responses import json_bodies
from services.router.text.requests import Parcel
from services.router.workflows.embed import embed, encoder_of
from services.router.workflows.workflow import Workflow

QUERIES_AT_ONCE = 256


def search_work(
    record: CollectionRecord, ask: SearchRequest, vectors: bytes, shard: int
) -> SearchWork:
    """Return one shard's job for some of a request's queries."""
    after = (ask.after or "").split(",")
    return SearchWork(
        collection=record.id,
        vectors=vectors,
        k=ask.k,
        filter=ask.filter,
        min_score=ask.min_score,
        with_text=ask.include_text,
        with_metadata=ask.include_metadata,
        after=(after[shard] if shard < len(after) else None) or None,
        shard=shard,
        effort=effort_of(ask.effort, ask.ef, exact=ask.exact),
        budget_ms=ask.budget_ms,
        spent_ms=ask.spent_ms,
    )


def search_parcels(
    record: CollectionRecord, ask: SearchRequest, vectors: bytes, shard: int, most: int
) -> list[Parcel]:
    """Return one shard's jobs: at most `most` queries each, in order."""
    size = 4 * record.dimension
    step = size * max(1, min(most, QUERIES_AT_ONCE))
    return [
        Parcel(encode(search_work(record, ask, rows, shard)), len(rows) // size, 0)
        for rows in (vectors[i : i + step] for i in range(0, len(vectors), step))
    ]


def merged(shards: Sequence[Sequence[SearchResult]], k: int) -> SearchResult:
    """Return the best k hits of each query over all shards, and all shards' applied ids.

    The path is the first shard's; the report is that of the shard that took longest, with the least effort of all.
    """
    shown = [[row for result in results for row in result.shown] for results in shards]
    scores = [[row for result in results for row in result.scores] for results in shards]
    first, applied = shards[0][0], ",".join(results[-1].applied for results in shards)
    report = _report([result.report for results in shards for result in results])
    if len(shards) == 1:
        return SearchResult(
            shown=shown[0], scores=scores[0], applied=applied, path=first.path, report=report
        )
    best = [
        _best(per_shard, near, k)
        for per_shard, near in zip(zip(*shown, strict=True), zip(*scores, strict=True), strict=True)
    ]
    return SearchResult(
        shown=[row for row, _ in best],
        scores=[row for _, row in best],
        applied=applied,
        path=first.path,
        report=report,
    )


def _report(reports: Sequence[SearchReport | None]) -> SearchReport | None:
    """Return one report of searches that ran side by side; None where a shard sent none."""
    known = [report for report in reports if report is not None]
    if len(known) < len(reports):
        return None
    if len(known) == 1:
        return known[0]
    slowest = max(known, key=lambda report: report.took_ms)
    efforts = [report.effort for report in known if report.effort != "exact"]
    predicted = [report.predicted_ms for report in known]
    told = [each for each in predicted if each is not None]
    return msgspec.structs.replace(
        slowest,
        effort=min(efforts) if efforts else "exact",
        predicted_ms=max(told) if len(told) == len(known) else None,
        fits=None if slowest.fits is None else all(report.fits for report in known),
    )


def _best(
    shown: Sequence[Sequence[bytes]], scores: Sequence[Sequence[float]], k: int
) -> tuple[list[bytes], list[float]]:
    """Return one query's best k hits of all shards and their scores; of equal ones the first shard's go first."""
    every = [
        pair
        for row, near in zip(shown, scores, strict=True)
        for pair in zip(row, near, strict=True)
    ]
    chosen = heapq.nlargest(k, every, key=_score)
    return [hit for hit, _ in chosen], [score for _, score in chosen]


def _score(pair: tuple[bytes, float]) -> float:
    return pair[1]


async def find(
    workflow: Workflow,
    record: CollectionRecord,
    ask: SearchRequest,
    parcel: tuple[int, int],
    queries: int,
) -> SearchResult:
    """Embed questions that are texts, search every shard, and return the merged hits."""
    vectors, clock = ask.vectors, workflow.context.bus.clock
    if ask.tokens:
        began_s = clock.perf_s()
        vectors = await embed(
            workflow, "embed", await encoder_of(workflow, record), ask.tokens, parcel
        )
        spent_ms = ask.spent_ms + 1000 * (clock.perf_s() - began_s)
        ask = msgspec.structs.replace(ask, spent_ms=spent_ms)
    family = workflow.context.bus.writes.search_family(record.id)
    per_shard = [search_parcels(record, ask, vectors, s, queries) for s in range(record.shards)]
    flat = [parcels[i] for i in range(len(per_shard[0])) for parcels in per_shard]
    _, results = await workflow.gather("search", [family], SEARCH_CLASSES, flat)
    found = [cast("SearchResult", result) for result in results]
    return merged([found[s :: record.shards] for s in range(record.shards)], ask.k)


async def search(workflow: Workflow, plan: SearchPlan) -> RequestResult:
    """Find the hits of a search, and write its response body."""
    ask = plan.ask
    found = await find(workflow, plan.collection, ask, plan.parcel, plan.queries)
    view = ResponseOptions(kind="search", many=ask.many)
    return RequestResult(body=json_bodies.search(view, workflow.request, found))
