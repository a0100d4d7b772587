"""GET /v1/requests/{id}/timeline: the jobs of a request across services, from their records and logs.

A workflow keeps no list of its jobs: their ids are functions of request, family, stage and index, so the timeline looks
for them in every family that can have some. A re-embedding, which has jobs for each page of a collection, is shown
without its jobs. A grounded answer is shown with its stages, too, by the clock of the router that ran them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

from aiohttp import web

from common.bus import Bus, JobState
from common.ids import Family, child_id, family_of
from common.registry.collections import Collections
from services.router.cards import Cards
from services.router.http.receiver import TENANT
from services.router.http.records import TenantRecords
from services.router.http.replies import reply_json
from services.router.responses.outcomes import error_of
from services.router.workflows.progress import GENERATE_STAGE, latest_grounded_progress
from services.router.workflows.retrieve import RERANK_STAGE, REWRITE_STAGE

MOST_JOBS = 32
MOST_FAMILIES = 256
_AT_ONCE = 64
# The stages that each kind of worker runs.
_ENCODED, _SEARCHED = ("embed", "part", "quotes", RERANK_STAGE), ("search", "known")
_GENERATED = (REWRITE_STAGE, GENERATE_STAGE)


class Stage(NamedTuple):
    """One job of a request: the name "request" means the workflow itself; `nth` counts within a stage."""

    name: str
    nth: int
    state: JobState


class TimelineApi:
    """Finds the jobs of a request and the events of each."""

    def __init__(self, records: TenantRecords, bus: Bus, cards: Cards) -> None:
        self._records, self._bus, self._cards = records, bus, cards
        self._collections = Collections(bus)

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get("/v1/requests/{id}/timeline", self.get)]

    async def get(self, request: web.Request) -> web.Response:
        """Return a request's jobs in the order of their admission, each with its events and their times."""
        name = await self._records.request(request)
        state = await self._bus.jobs.get(name)
        stages = [] if state is None else [Stage("request", 0, state)]
        if state is not None and family_of(name).name == "request":
            stages += await self._children(request[TENANT], name)
        stages.sort(key=lambda stage: (stage.state.created_ms, stage.name != "request"))
        jobs = [await self._shown(stage) for stage in stages]
        now_s = self._bus.clock.now_ms() / 1000
        body: dict[str, Any] = {"id": name, "object": "timeline", "now": now_s, "jobs": jobs}
        if family_of(name).name == "request":
            progress = latest_grounded_progress(await self._bus.jobs.log(name))
            if progress is not None and "stages" in progress.retrieval:
                body["stages"] = progress.retrieval["stages"]
        return reply_json(body, headers={"Cache-Control": "no-store"})

    async def _children(self, tenant: str, request: str) -> list[Stage]:
        families = await self._candidates(tenant)
        found: list[Stage] = []
        index = 0
        while families and len(found) < MOST_JOBS:
            looked = [(f, s, child_id(request, f, s, index)) for f, s in families]
            states: list[JobState | None] = []
            for first in range(0, len(looked), _AT_ONCE):
                few = looked[first : first + _AT_ONCE]
                states += await asyncio.gather(*(self._bus.jobs.get(job) for _, _, job in few))
            there = [
                (f, s, state) for (f, s, _), state in zip(looked, states, strict=True) if state
            ]
            found += [Stage(stage, index, state) for _, stage, state in there]
            # The next job of a stage is in the same family, or in another partition of that family.
            known = {(family.name, stage) for family, stage, _ in there}
            families = [(f, s) for f, s in families if (f.name, s) in known]
            index += 1
        return found[:MOST_JOBS]

    async def _candidates(self, tenant: str) -> list[tuple[Family, str]]:
        """Return the families, each with a stage that runs there, in which a tenant's request may have jobs."""
        collections = await self._collections.all(tenant)
        where = sorted({self._bus.writes.search_family(record.id) for record in collections})
        searched = [(f, stage) for f in where[:MOST_FAMILIES] for stage in _SEARCHED]
        computed = [
            (family, stage)
            for family in await self._cards.families()
            for stage in (_GENERATED if family.name.startswith("chat.") else _ENCODED)
        ]
        return computed + searched

    async def _shown(self, stage: Stage) -> dict[str, Any]:
        state = stage.state
        family = family_of(state.job)
        body: dict[str, Any] = {
            "id": state.job,
            "stage": stage.name,
            "index": stage.nth,
            "kind": family.kind,
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
            log = await self._bus.jobs.log(state.job)
            if log and log[-1].ends:
                body |= error_of(log[-1]).body()
        return body


def _events(state: JobState) -> Iterator[dict[str, Any]]:
    """Yield the events of a job in order of time."""
    yield {"what": "admitted", "at": state.created_ms / 1000}
    rest: list[tuple[int, str, str]] = [(t.at_ms, t.what, t.worker) for t in state.trail]
    if state.first_ms:
        rest.append((state.first_ms, "first", ""))
    for at_ms, what, worker in sorted(rest):
        yield {"what": what, "at": at_ms / 1000} | ({"worker": worker} if worker else {})
    if state.ended_ms:
        yield {"what": "ended", "at": state.ended_ms / 1000}
