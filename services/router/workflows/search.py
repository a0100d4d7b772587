"""The stages of a search: embed the questions, search every shard, merge the hits."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import cast

from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import Hit, SearchResult, SearchWork
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
        ef=ask.ef,
        exact=ask.exact,
        after=(after[shard] if shard < len(after) else None) or None,
        shard=shard,
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


def merged(shards: Sequence[Sequence[SearchResult]], k: int) -> tuple[list[list[Hit]], str, str]:
    """Return each query's best k hits over all shards, the path that found them, and the applied ids."""
    per_shard = [[row for result in results for row in result.hits] for results in shards]
    path, applied = shards[0][0].path, ",".join(results[-1].applied for results in shards)
    if len(per_shard) == 1:
        return per_shard[0], path, applied
    rows = zip(*per_shard, strict=True)
    best = [
        heapq.nlargest(k, (hit for row in row_set for hit in row), key=_score) for row_set in rows
    ]
    return best, path, applied


def _score(hit: Hit) -> float:
    return hit.score


async def find(
    workflow: Workflow,
    record: CollectionRecord,
    ask: SearchRequest,
    parcel: tuple[int, int],
    queries: int,
) -> tuple[list[list[Hit]], str, str]:
    """Embed questions that are texts, search every shard, merge; return hits by query, the path, the applied ids."""
    vectors = ask.vectors
    if ask.tokens:
        vectors = await embed(
            workflow, "embed", await encoder_of(workflow, record), ask.tokens, parcel
        )
    family = workflow.context.bus.writes.search_family(record.id)
    per_shard = [search_parcels(record, ask, vectors, s, queries) for s in range(record.shards)]
    flat = [parcels[i] for i in range(len(per_shard[0])) for parcels in per_shard]
    _, results = await workflow.gather("search", [family], SEARCH_CLASSES, flat)
    found = [cast("SearchResult", result) for result in results]
    return merged([found[s :: record.shards] for s in range(record.shards)], ask.k)


async def search(workflow: Workflow, plan: SearchPlan) -> RequestResult:
    """Find the hits of a search, and write its response body."""
    ask = plan.ask
    hits, path, applied = await find(workflow, plan.collection, ask, plan.parcel, plan.queries)
    view = ResponseOptions(kind="search", many=ask.many)
    render = partial(json_bodies.search, view, workflow.request, hits, path, applied)
    body = await workflow.context.pool.run(render, inline=ask.count * ask.k <= 1000)
    return RequestResult(body=body)
