"""The tuning of a collection's index: the routes that begin, show and cancel it; vector_search carries it out."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from common.bus import Bus
from common.errors import Conflict, NotFound
from common.ids import ulid
from common.registry.tunings import Tunings
from common.wire.registry import CollectionRecord
from common.wire.tuning import ENDED, CollectionTuning, TuningGoal
from services.router.http.receiver import Receiver
from services.router.http.records import TenantRecords
from services.router.http.replies import reply_json
from services.router.http.shards import processes_of
from services.router.text.bodies import TuneBody, decode


class TuningApi:
    """Begins a tuning of a tenant's collection, shows its progress and result, and cancels it."""

    def __init__(self, receiver: Receiver, records: TenantRecords, bus: Bus) -> None:
        self._receiver, self._records, self._bus = receiver, records, bus
        self._tunings = Tunings(bus)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        path = "/v1/collections/{name}/tune"
        return [
            web.post(path, self.begin),
            web.get(path, self.get),
            web.delete(path, self.cancel),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        """Begin a tuning; Conflict `tuning_under_way` while a living process carries another one out."""
        record = await self._records.collection(request)
        body = decode(await self._receiver.body(request), TuneBody)
        now_ms = self._bus.clock.now_ms()
        living = {process.name for process in await processes_of(self._bus, record)}

        def begun(known: CollectionTuning | None) -> CollectionTuning:
            alive = known is not None and (known.tuner in living if known.tuner else bool(living))
            if known is not None and known.state not in ENDED and alive:
                raise Conflict(
                    f"collection {record.name!r} is being tuned (tuning {known.id}, {known.state}): ask again when it "
                    "has ended",
                    code="tuning_under_way",
                )
            return CollectionTuning(
                collection=record.id,
                id=ulid(now_ms),
                goal=TuningGoal(
                    body.recall,
                    None if body.p99_ms is None else body.p99_ms / 1000,
                    body.memory_bytes,
                ),
                plan_only=body.plan_only,
                in_force=known.in_force if known is not None else None,
                began_ms=now_ms,
            )

        made = await self._tunings.update(record.id, begun)
        assert made is not None
        return reply_json(_shown(record, made), status=202)

    async def get(self, request: web.Request) -> web.Response:
        """Return the last tuning; NotFound `tuning_not_found` if there was none."""
        record = await self._records.collection(request)
        found = await self._tunings.get(record.id)
        if found is None:
            raise _never(record)
        return reply_json(_shown(record, found))

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel the running tuning, and return it; an ended tuning stays as it is. NotFound `tuning_not_found`."""
        record = await self._records.collection(request)
        now_ms = self._bus.clock.now_ms()

        def cancelled(known: CollectionTuning | None) -> CollectionTuning:
            if known is None:
                raise _never(record)
            if known.state in ENDED:
                return known
            return msgspec.structs.replace(known, state="cancelled", ended_ms=now_ms)

        made = await self._tunings.update(record.id, cancelled)
        assert made is not None
        return reply_json(_shown(record, made))


def _never(record: CollectionRecord) -> NotFound:
    return NotFound(f"collection {record.name!r} was never tuned", code="tuning_not_found")


def _shown(record: CollectionRecord, tuning: CollectionTuning) -> dict[str, Any]:
    """Return a tuning in the form that clients see."""
    told: dict[str, Any] = msgspec.to_builtins(tuning)
    return {"object": "tuning", **told, "collection": record.name}
