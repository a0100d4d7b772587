"""The session eraser: refuses new turns, stops running jobs, removes all data, and searches again for the proof.

Every step may be repeated. The data that a repetition needs are removed last: the list of a session's jobs, and the
session's entry in the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from common import log
from common.bus import Bus
from common.errors import Unavailable
from common.ids import family_of
from common.registry.leftovers import (
    CLAIMS,
    DEAD,
    JOURNAL,
    LANE,
    STREAMS,
    Leftovers,
    LeftoverSearch,
    ulids_in,
    ulids_of,
)
from common.registry.sessions import Sessions
from services.kv_store import metrics
from services.kv_store.deletion.page_eraser import ErasedPages, PageEraser
from services.kv_store.deletion.worker_eraser import WorkerEraser

MOST_LOOKS = 5
_POLL_S = 0.05  # records of jobs are polled, since a job's end notifies only its router
_LEAST_S = 1.0
_log = log.get("kv_store")
Named = tuple[str, str]  # a session's id and its tenant

NOT_SEARCHED = [
    "the server's append-only file holds what was removed until its next rewrite (BGREWRITEAOF)",
    "of a page that a worker forgot its memory holds computed numbers, no text, until another page takes its place",
]
# The proof's words for the search: by the indexes (False), or by a walk over every key of every server (True).
_SEARCHED = {
    False: (
        "keys of its jobs and requests: job, log, seen, claimed; of itself: turns, held",
        {
            DEAD: "entries that the index of dead letters names for its jobs",
            JOURNAL: "job of each ring of the last minute, since its first request",
            LANE: "entries that the records of its jobs name",
        },
        "claims that its requests name",
    ),
    True: ("keys", dict.fromkeys(STREAMS, "job of each entry"), "request of each claim"),
}
PAGES_NOT_SEARCHED = (
    "a page that a turn left which was not kept, or that a worker put which did not answer, may be in the page tiers"
    " until SPILLWAY_PAGES_TTL_S after its last use"
)


class SessionEraser:
    """Erases sessions; each process has one."""

    def __init__(
        self,
        bus: Bus,
        pages: PageEraser | None = None,
        workers: WorkerEraser | None = None,
    ) -> None:
        self._bus, self._pages, self._workers = bus, pages, workers

    async def erase(
        self, sessions: Sequence[Named], until_ms: int, *, prove: bool
    ) -> list[dict[str, Any]]:
        """Erase all data of sessions except their records; with `prove` search again and return proofs.

        Unavailable `session_running` if a turn has not stopped by `until_ms`: the caller tries again. Raises BusDown.
        """
        search = LeftoverSearch(self._bus, [name for name, _ in sessions])
        found = await self._stop(search, until_ms)
        # Workers first: a worker puts no page into a tier once it has forgotten the page.
        held = {name: await _erased(self._workers, name) for name, _ in sessions} if prove else {}
        pages = {name: await _erased(self._pages, name) for name, _ in sessions} if prove else {}
        removed, looks = Leftovers(), 1
        while found.count and looks <= MOST_LOOKS:
            removed.add(found)
            await search.remove(found)
            found = await search.look() if prove else Leftovers()
            looks += 1
            if found.count:
                metrics.LEFT.inc()
        if found.count:
            raise Unavailable(
                f"{found.count} things of the session came back while it was erased; repeat the deletion",
                code="session_running",
                retry_after_s=2,
            )
        return [
            proof(
                name,
                search.jobs[name],
                removed,
                found,
                held=held.get(name),
                pages=pages.get(name),
                at_ms=self._bus.clock.now_ms(),
            )
            for name, _ in sessions
        ]

    async def erase_turn(self, session: str, job: str) -> None:
        """Erase an ended turn, its jobs, and the session's pages, which may contain the turn. Raises BusDown.

        The pages of the other turns are recomputed when needed.
        """
        if self._workers is not None:
            await self._workers.erase(session, goes_on=True)
        await _erased(self._pages, session)
        sessions, search = Sessions(self._bus), LeftoverSearch(self._bus, ())
        await sessions.remove_turn(session, job)
        search.jobs[session] = {job, (await sessions.jobs(session)).get(job) or job}
        await search.remove(await search.look())

    # -- stopping --------------------------------------------------------------------------------------

    async def _stop(self, search: LeftoverSearch, until_ms: int) -> Leftovers:
        """Cancel the requests, then their running jobs; once all have ended, return the sessions' leftovers."""
        until_ms = max(until_ms, self._bus.clock.now_ms() + int(1000 * _LEAST_S))
        while True:
            await search.trace()  # a request may have got another job meanwhile
            found = await search.look()
            jobs = [job for name in found.keys if (job := name.partition(":job:")[2])]
            open_jobs = [job for job in jobs if await self._runs(job)]
            if not open_jobs:
                return found
            # A running request would admit its next job, so the requests must end before jobs are searched again.
            requests = [job for job in open_jobs if family_of(job).name == "request"]
            for job in requests or open_jobs:
                await self._bus.control.cancel(job)
            while any([await self._runs(job) for job in requests or open_jobs]):
                if self._bus.clock.now_ms() > until_ms:
                    raise Unavailable(
                        "a turn of the session has not stopped yet; no new one is taken, repeat the deletion",
                        code="session_running",
                        retry_after_s=2,
                    )
                await asyncio.sleep(_POLL_S)

    async def _runs(self, job: str) -> bool:
        state = await self._bus.jobs.get(job)
        return state is not None and not state.over


async def _erased(eraser: PageEraser | WorkerEraser | None, session: str) -> ErasedPages | None:
    return None if eraser is None else await eraser.erase(session)


def proof(
    session: str,
    jobs: Collection[str],
    removed: Leftovers,
    left: Leftovers,
    *,
    held: ErasedPages | None,
    pages: ErasedPages | None,
    at_ms: int,
) -> dict[str, Any]:
    """Return the proof of a session's deletion: the removed data, and the stores found empty afterwards.

    `jobs` are the jobs and requests that ran for the session.
    """
    ulids = ulids_of([session, *jobs])

    def mine(name: str) -> bool:
        return any(ulid in ulids for ulid in ulids_in(name))

    gone: dict[str, int] = {}
    for name in filter(mine, removed.keys):
        kind = name.partition("}:")[2].partition(":")[0]
        kind = next((part for part in ("turns", "held") if name.endswith(f":{part}")), kind)
        gone[kind] = gone.get(kind, 0) + 1
    for name, entries in removed.entries.items():
        kind = next(part for part in STREAMS if part in name).strip(":")
        count = sum(map(mine, entries.values()))
        gone[kind] = gone.get(kind, 0) + count
    gone["claims"] = len(removed.claims)
    for what, erased in (("worker_pages", held), ("pages", pages)):
        if erased is not None:
            gone[what] = erased.pages
    of_ids, of_entry, of_claim = _SEARCHED[left.walked]
    searched: list[dict[str, Any]] = [
        {"pattern": f"*{ulid}*", "in": of_ids, "found": 0} for ulid in sorted(ulids)
    ]
    searched += [
        {"pattern": f"*{part}*", "in": of_entry[part], "read": left.read[part], "found": 0}
        for part in STREAMS
    ]
    searched.append(
        {"pattern": f"{CLAIMS}*", "in": of_claim, "read": left.read[CLAIMS], "found": 0}
    )
    return {
        "id": session,
        "object": "session",
        "deleted": True,
        "removed": gone,
        "proof": {
            "stores": [
                {
                    "store": "bus",
                    "servers": left.servers,
                    "keys": left.scanned,
                    "searched": searched,
                },
                *(held.stores if held else ()),
                *(pages.stores if pages else ()),
            ],
            "at": at_ms / 1000,
            "not_searched": [
                *NOT_SEARCHED,
                *(held.not_searched if held else ()),
                *([PAGES_NOT_SEARCHED, *pages.not_searched] if pages else ()),
            ],
        },
    }
