"""The stages of a search: embed the questions, search every shard, merge the hits."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from common.errors import Conflict, Unavailable
from common.registry.layout import ShardLayout
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import MissingShard, SearchReport, SearchResult, SearchWork, effort_of
from common.wire.workflows import RequestResult, ResponseOptions, SearchPlan, SearchRequest
from services.router.admission.policy import SEARCH_CLASSES
from services.router.responses import json_bodies
from services.router.text.requests import Parcel
from services.router.workflows.embed import embed, encoder_of
from services.router.workflows.workflow import Workflow, letters

QUERIES_AT_ONCE = 256


def search_work(
    record: CollectionRecord, ask: SearchRequest, vectors: bytes, shard: int, after: str | None
) -> SearchWork:
    """Return one shard's job for some of a request's queries, after it has applied the write `after`."""
    return SearchWork(
        collection=record.id,
        vectors=vectors,
        k=ask.k,
        filter=ask.filter,
        min_score=ask.min_score,
        with_text=ask.include_text,
        with_metadata=ask.include_metadata,
        after=after,
        shard=shard,
        effort=effort_of(ask.effort, ask.ef, exact=ask.exact),
        budget_ms=ask.budget_ms,
        spent_ms=ask.spent_ms,
    )


def search_parcels(
    record: CollectionRecord,
    ask: SearchRequest,
    vectors: bytes,
    shard: int,
    most: int,
    after: str | None,
) -> list[Parcel]:
    """Return one shard's jobs: at most `most` queries each, in order."""
    size = 4 * record.dimension
    step = size * max(1, min(most, QUERIES_AT_ONCE))
    return [
        Parcel(encode(search_work(record, ask, rows, shard, after)), len(rows) // size, 0)
        for rows in (vectors[i : i + step] for i in range(0, len(vectors), step))
    ]


def merged(
    shards: Mapping[int, Sequence[SearchResult]], k: int, missing: list[MissingShard] | None = None
) -> SearchResult:
    """Return the best k hits of each query over all shards, given by number, and the token of applied ids.

    The path is the first shard's; the report is that of the shard that took longest, with the least effort of all.
    """
    every = list(shards.values())
    shown = [[row for result in results for row in result.shown] for results in every]
    scores = [[row for result in results for row in result.scores] for results in every]
    first = every[0][0]
    applied = ShardLayout.token({number: results[-1].applied for number, results in shards.items()})
    report = _report([result.report for results in every for result in results])
    if len(every) == 1:
        return SearchResult(
            shown=shown[0],
            scores=scores[0],
            applied=applied,
            path=first.path,
            report=report,
            missing=missing,
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
        missing=missing,
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
    layout = await workflow.context.layouts.of(record)
    while True:
        try:
            return await _found(workflow, record, ask, vectors, queries, layout)
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
) -> SearchResult:
    """Return the hits of all shards of a layout, or of those that answer where the search may be partial."""
    family, after = workflow.context.bus.writes.search_family(record.id), layout.after(ask.after)
    parcels = {
        number: search_parcels(record, ask, vectors, number, queries, after.get(number))
        for number in layout.numbers
    }
    stage = f"search{letters(layout.version) if layout.version else ''}"
    if not ask.partial:
        per_shard = list(parcels.values())
        flat = [each[i] for i in range(len(per_shard[0])) for each in per_shard]
        _, results = await workflow.gather(stage, [family], SEARCH_CLASSES, flat)
        found = [cast("SearchResult", result) for result in results]
        count = len(layout.numbers)
        return merged({n: found[at::count] for at, n in enumerate(layout.numbers)}, ask.k)
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
    return merged(given, ask.k, missing)


async def search(workflow: Workflow, plan: SearchPlan) -> RequestResult:
    """Find the hits of a search, and write its response body."""
    ask = plan.ask
    found = await find(workflow, plan.collection, ask, plan.parcel, plan.queries)
    view = ResponseOptions(kind="search", many=ask.many)
    return RequestResult(body=json_bodies.search(view, workflow.request, found))
