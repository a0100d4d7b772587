"""The stages of a search: embed the questions, search every shard, merge the hits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import msgspec

from common.errors import Conflict, InvalidRequest, Unavailable
from common.registry.layout import ShardLayout
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import (
    NO_TEXTS,
    MissingShard,
    SearchReport,
    SearchResult,
    SearchWork,
    effort_of,
)
from common.wire.workflows import RequestResult, ResponseOptions, SearchPlan, SearchRequest
from services.router.admission.policy import SEARCH_CLASSES
from services.router.responses import json_bodies
from services.router.text.pool import TextPool
from services.router.text.requests import Parcel
from services.router.workflows import candidates
from services.router.workflows.embed import embed, encoder_of
from services.router.workflows.workflow import Workflow, letters

QUERIES_AT_ONCE = 256
_CANDIDATES_AT_ONCE = 4000  # candidates of a job, all queries together, that fit a message


def at_once(layout: ShardLayout, ask: SearchRequest) -> int:
    """Return the largest number of queries in one job, smaller where each shard returns its candidates."""
    if not ask.depth or len(layout.numbers) == 1:
        return QUERIES_AT_ONCE
    return max(1, min(QUERIES_AT_ONCE, _CANDIDATES_AT_ONCE // (2 * ask.depth)))


def search_work(
    record: CollectionRecord,
    ask: SearchRequest,
    vectors: bytes,
    texts: list[str],
    layout: ShardLayout,
    shard: int,
) -> SearchWork:
    """Return one shard's job for some of a request's queries: their vectors, their texts, or both."""
    return SearchWork(
        collection=record.id,
        vectors=vectors,
        k=ask.k,
        filter=ask.filter,
        min_score=ask.min_score,
        with_text=ask.include_text,
        with_metadata=ask.include_metadata,
        after=layout.after(ask.after).get(shard),
        shard=shard,
        effort=effort_of(ask.effort, ask.ef, exact=ask.exact),
        budget_ms=ask.budget_ms,
        spent_ms=ask.spent_ms,
        mode=ask.mode,
        texts=texts,
        depth=ask.depth,
        mmr=ask.mmr,
        with_scores=ask.with_scores,
        with_lists=ask.with_lists,
        alone=len(layout.numbers) == 1,
        following=ask.following,
    )


def search_parcels(
    record: CollectionRecord,
    ask: SearchRequest,
    vectors: bytes,
    layout: ShardLayout,
    shard: int,
    most: int,
) -> list[Parcel]:
    """Return one shard's jobs: at most `most` queries each, in order."""
    size = 4 * record.dimension
    step = max(1, min(most, at_once(layout, ask)))
    parcels = []
    for begin in range(0, ask.count, step):
        count = min(step, ask.count - begin)
        rows, texts = vectors[begin * size :][: count * size], ask.texts[begin:][:count]
        work = search_work(record, ask, rows, texts, layout, shard)
        parcels.append(Parcel(encode(work), count, 0))
    return parcels


async def merge(
    pool: TextPool,
    shards: Mapping[int, Sequence[SearchResult]],
    layout: ShardLayout,
    ask: SearchRequest,
    vectors: bytes,
    missing: list[MissingShard] | None = None,
) -> SearchResult:
    """Return the best k hits of each query over the results of `shards`, by shard number, and the `missing` shards.

    A ranking that compares many vectors runs in the pool. InvalidRequest `no_texts` if a search by words finds no
    texts.
    """
    every = list(shards.values())
    if ask.mode != "vector" and max(part.texts for parts in every for part in parts) == 0:
        raise InvalidRequest(NO_TEXTS, code="no_texts", param="mode")
    if not ask.depth or len(layout.numbers) == 1:
        found = merged(every, ask.k)
    else:
        few = candidates.comparisons(ask) <= candidates.FEW_COMPARISONS
        found = await pool.run(partial(candidates.ranked, every, ask, vectors), inline=few)
    applied = layout.token({number: parts[-1].applied for number, parts in shards.items()})
    return msgspec.structs.replace(found, applied=applied, missing=missing)


def merged(shards: Sequence[Sequence[SearchResult]], k: int) -> SearchResult:
    """Return the best k hits of each query over all shards, and all shards' applied ids.

    The path is the first shard's; the report is the slowest shard's, with the least effort of all shards.
    """
    if len(shards) == len(shards[0]) == 1:
        return shards[0][0]
    shown = [[row for result in results for row in result.shown] for results in shards]
    scores = [[row for result in results for row in result.scores] for results in shards]
    first, applied = shards[0][0], ",".join(results[-1].applied for results in shards)
    report = _report([result.report for results in shards for result in results])
    if report is not None and (scanned := _scanned(shards)):
        report = msgspec.structs.replace(report, scanned=scanned)
    whole = SearchResult(
        shown=shown[0],
        scores=scores[0],
        applied=applied,
        path=first.path,
        mode=first.mode,
        report=report,
        text_indexed=min(part.text_indexed for results in shards for part in results),
    )
    if len(shards) == 1:
        return whole
    best = [
        _best(per_shard, near, k)
        for per_shard, near in zip(zip(*shown, strict=True), zip(*scores, strict=True), strict=True)
    ]
    return msgspec.structs.replace(
        whole, shown=[row for row, _ in best], scores=[row for _, row in best]
    )


def _report(reports: Sequence[SearchReport | None]) -> SearchReport | None:
    """Return one report of searches that ran at the same time; None if a shard sent none."""
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
        lists=sum(report.lists for report in known),
        quantizer=_quantizers(known),
    )


def _scanned(shards: Sequence[Sequence[SearchResult]]) -> list[list[int]]:
    """Return the lists read for each query by the shard that read the most lists."""
    every = [
        [lists for result in results if result.report for lists in result.report.scanned]
        for results in shards
    ]
    return max(every, key=lambda scanned: sum(map(len, scanned)))


def _quantizers(reports: Sequence[SearchReport]) -> str:
    """Return the quantizers of the shards' lists, "exact" for a shard that read none; "" if no shard read lists."""
    if not any(report.quantizer for report in reports):
        return ""
    return ",".join(sorted({report.quantizer or "exact" for report in reports}))


def _best(
    shown: Sequence[Sequence[bytes]], scores: Sequence[Sequence[float]], k: int
) -> tuple[list[bytes], list[float]]:
    """Return one query's best k hits of all shards and their scores; of equal scores the first shard's go first."""
    hits = [hit for row in shown for hit in row]
    near = [score for row in scores for score in row]
    order = sorted(range(len(near)), key=near.__getitem__, reverse=True)[:k]
    return [hits[place] for place in order], [near[place] for place in order]


async def find(
    workflow: Workflow,
    record: CollectionRecord,
    ask: SearchRequest,
    parcel: tuple[int, int],
    queries: int,
    nth: int = 0,
) -> SearchResult:
    """Embed questions that are texts, search every shard, and return the merged hits.

    If a request searches several times, each search needs its own `nth`, which is part of the names of its jobs.
    """
    prefix = f"r{letters(nth)}" if nth else ""
    vectors, clock = ask.vectors, workflow.context.bus.clock
    if ask.tokens:
        began_s = clock.perf_s()
        spec = await encoder_of(workflow, record)
        with workflow.timeline.stage("embed", nth):
            vectors = await embed(
                workflow, f"{prefix}embed", spec, ask.tokens, parcel, question=True
            )
        spent_ms = ask.spent_ms + 1000 * (clock.perf_s() - began_s)
        ask = msgspec.structs.replace(ask, spent_ms=spent_ms)
    layout = await workflow.context.layouts.of(record)
    while True:
        try:
            with workflow.timeline.stage("search", nth):
                return await _found(workflow, record, ask, vectors, queries, layout, prefix)
        except Conflict as error:
            if error.code != "layout_changed":
                raise
            newer = await workflow.context.layouts.now(record)
            if newer.numbers == layout.numbers:
                raise
            layout = newer


async def _found(
    workflow: Workflow,
    record: CollectionRecord,
    ask: SearchRequest,
    vectors: bytes,
    queries: int,
    layout: ShardLayout,
    prefix: str,
) -> SearchResult:
    """Return the merged hits of a layout's shards; if the search may be partial, of the shards that answer."""
    context = workflow.context
    family = context.bus.writes.search_family(record.id)
    parcels = {
        number: search_parcels(record, ask, vectors, layout, number, queries)
        for number in layout.numbers
    }
    stage = f"{prefix}search{letters(layout.version) if layout.version else ''}"
    if not ask.partial:
        per_shard = list(parcels.values())
        flat = [each[i] for i in range(len(per_shard[0])) for each in per_shard]
        _, results = await workflow.gather(stage, [family], SEARCH_CLASSES, flat)
        found = [cast("SearchResult", result) for result in results]
        count = len(layout.numbers)
        shards = {number: found[at::count] for at, number in enumerate(layout.numbers)}
        return await merge(context.pool, shards, layout, ask, vectors)
    outcomes = await asyncio.gather(
        *(
            workflow.gather(f"{stage}s{letters(number)}", [family], SEARCH_CLASSES, each, bulk=True)
            for number, each in parcels.items()
        ),
        return_exceptions=True,
    )
    given: dict[int, list[SearchResult]] = {}
    missing: list[MissingShard] = []
    for number, outcome in zip(layout.numbers, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            given[number] = [cast("SearchResult", result) for result in outcome[1]]
        elif isinstance(outcome, Unavailable):
            missing.append(MissingShard(number, outcome.message))
            last = outcome
        else:
            raise outcome
    if not given:
        raise last
    return await merge(context.pool, given, layout, ask, vectors, missing)


async def search(workflow: Workflow, plan: SearchPlan) -> RequestResult:
    """Find the hits of a search, and write its response body."""
    ask = plan.ask
    found = await find(workflow, plan.collection, ask, plan.parcel, plan.queries)
    view = ResponseOptions(kind="search", many=ask.many)
    return RequestResult(body=json_bodies.search(view, workflow.request, found))
