"""GET /v1/requests/{id}/timeline: what became of a request in every service, from its record, its jobs' and their logs.

A request of several jobs keeps no list of them: their ids are functions of request, family, stage and index, so they
are looked for where they can be. A re-embedding, which pages through a collection, is shown without its jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from common.bus import JobState
from common.ids import Family, child_id, family_of
from common.registry.collections import Collections
from services.router.http.context import ROUTER, TENANT, Router, reply
from services.router.http.requests import request_of
from services.router.responses.outcomes import error_of
from services.router.workflows.progress import GENERATE_STAGE

MOST_JOBS = 32
MOST_FAMILIES = 256
_AT_ONCE = 64
# Stages by what runs them.
_ENCODED, _SEARCHED, _GENERATED = ("embed", "part"), ("search", "known"), (GENERATE_STAGE,)


class Stage(NamedTuple):
    """One job of a request: "request" is the request's own, of several jobs; `nth` counts within a stage."""

    name: str
    nth: int
    state: JobState


async def get(request: web.Request) -> web.Response:
    """Return a request's jobs in the order they were admitted, each with what befell it and when."""
    router = request.app[ROUTER]
    name = await request_of(request, router)
    state = await router.bus.jobs.get(name)
    stages = [] if state is None else [Stage("request", 0, state)]
    if state is not None and family_of(name).name == "request":
        stages += await _children(router, request[TENANT], name)
    stages.sort(key=lambda stage: (stage.state.created_ms, stage.name != "request"))
    jobs = [await _shown(router, stage) for stage in stages]
    body = {"id": name, "object": "timeline", "now": router.clock.now_ms() / 1000, "jobs": jobs}
    return reply(msgspec.json.encode(body), headers={"Cache-Control": "no-store"})


async def _children(router: Router, tenant: str, request: str) -> list[Stage]:
    families = await _candidates(router, tenant)
    found: list[Stage] = []
    index = 0
    while families and len(found) < MOST_JOBS:
        looked = [(f, s, child_id(request, f, s, index)) for f, s in families]
        states: list[JobState | None] = []
        for first in range(0, len(looked), _AT_ONCE):
            few = looked[first : first + _AT_ONCE]
            states += await asyncio.gather(*(router.bus.jobs.get(job) for _, _, job in few))
        there = [(f, s, state) for (f, s, _), state in zip(looked, states, strict=True) if state]
        found += [Stage(stage, index, state) for _, stage, state in there]
        # The next of a stage is in the same family, or in another partition of it.
        known = {(family.name, stage) for family, stage, _ in there}
        families = [(f, s) for f, s in families if (f.name, s) in known]
        index += 1
    return found[:MOST_JOBS]


async def _candidates(router: Router, tenant: str) -> list[tuple[Family, str]]:
    """Return the families, with a stage that runs there, in which a tenant's request may have jobs."""
    collections = await Collections(router.bus).all(tenant)
    where = sorted({router.bus.writes.search_family(record.id) for record in collections})
    searched = [(f, stage) for f in where[:MOST_FAMILIES] for stage in _SEARCHED]
    computed = [
        (family, stage)
        for family in await router.families()
        for stage in (_GENERATED if family.name.startswith("chat.") else _ENCODED)
    ]
    return computed + searched


async def _shown(router: Router, stage: Stage) -> dict[str, Any]:
    state = stage.state
    family = family_of(state.job)
    body: dict[str, Any] = {
        "id": state.job,
        "stage": stage.name,
        "index": stage.nth,
        "kind": family.name.split(".", maxsplit=1)[0],
        "family": str(family),
        "lane": "own" if state.lane.startswith("w.") else state.lane,
        "state": state.state,
        "items": state.items,
        "tokens": state.tokens,
        "attempts": state.attempts,
        "deadline": state.deadline_ms / 1000,
        "events": list(_events(state)),
    }
    if state.over and state.state != "result":
        log = await router.bus.jobs.log(state.job)
        if log and log[-1].ends:
            body |= error_of(log[-1]).body()
    return body


def _events(state: JobState) -> Iterator[dict[str, Any]]:
    """Yield what befell a job, in order of time."""
    yield {"what": "admitted", "at": state.created_ms / 1000}
    rest: list[tuple[int, str, str]] = [(t.at_ms, t.what, t.worker) for t in state.trail]
    if state.first_ms:
        rest.append((state.first_ms, "first", ""))
    for at_ms, what, worker in sorted(rest):
        yield {"what": what, "at": at_ms / 1000} | ({"worker": worker} if worker else {})
    if state.ended_ms:
        yield {"what": "ended", "at": state.ended_ms / 1000}
