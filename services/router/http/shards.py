"""The shards of a collection: where they live, and the operator's verbs that place them anew."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from common.bus import Bus
from common.registry.layout import SPACE
from common.registry.placement_plan import ProcessLoad, loads
from common.registry.placements import Placements
from common.wire.registry import (
    CollectionPlacement,
    CollectionRecord,
    HeldShard,
    PlacedReplica,
    PlacedShard,
)
from services.router.http.receiver import Receiver
from services.router.http.records import TenantRecords
from services.router.http.replies import reply_json

SHARDS = "/v1/collections/{name}/shards"


class ShardsApi:
    """Lists the shards of a tenant's collection."""

    def __init__(self, receiver: Receiver, records: TenantRecords, bus: Bus) -> None:
        self._receiver, self._records, self._bus = receiver, records, bus
        self._placements = Placements(bus)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get(SHARDS, self.list_all)]

    async def list_all(self, request: web.Request) -> web.Response:
        """List the shards with their ranges, replicas and sizes, and what is missing."""
        record = await self._records.collection(request)
        placement = await self._placements.get(record.id)
        if placement is None:
            placement = await spread_of(self._bus, record)
        return reply_json(await self._shown(record, placement))

    async def _shown(self, record: CollectionRecord, placement: CollectionPlacement) -> Any:
        living = {process.name for process in await processes_of(self._bus, record)}
        holdings = await self._placements.holdings()
        held = {
            (name, each.number): each
            for name, holding in holdings.items()
            for each in holding.shards
            if each.collection == record.id
        }
        shards = [
            _shown(one, living, held) for one in sorted(placement.shards, key=lambda s: s.low)
        ]
        return {
            "object": "list",
            "collection": record.name,
            "placed": record.placed,
            "layout": placement.layout,
            "replicas": placement.replicas,
            "data": shards,
            "missing": [one["shard"] for one in shards if not one["served"]],
        }


def _shown(
    one: PlacedShard, living: set[str], held: dict[tuple[str, int], HeldShard]
) -> dict[str, Any]:
    """Return a shard as clients see it."""
    leaving = {each.replaces for each in one.replicas if each.replaces}
    replicas = []
    for each in one.replicas:
        known = held.get((each.name, one.number))
        replicas.append(
            {
                "name": each.name,
                "state": "leaving" if each.name in leaving else each.state,
                "alive": each.name in living,
                "rows": known.rows if known else None,
                "bytes": known.bytes if known else None,
                "why": known.why if known else "",
            }
        )
    serving = [
        each.name for each in one.replicas if each.state == "serving" and each.name in living
    ]
    sizes = [known for name in serving if (known := held.get((name, one.number)))]
    return {
        "shard": one.number,
        "low": one.low,
        "high": one.high,
        "rows": max((known.rows for known in sizes), default=None),
        "bytes": max((known.bytes for known in sizes), default=None),
        "served": bool(serving),
        "split": msgspec.to_builtins(one.split) if one.split is not None else None,
        "replicas": replicas,
    }


async def processes_of(bus: Bus, record: CollectionRecord) -> list[ProcessLoad]:
    """Return the living processes that can hold shards of a collection, with their load."""
    family = bus.writes.search_family(record.id)
    living = [
        worker.replica
        for worker in await bus.workers.living(family)
        if worker.replica and worker.address and not worker.draining
    ]
    placements = Placements(bus)
    return loads(living, await placements.holdings(), (await placements.all()).values())


async def spread_of(bus: Bus, record: CollectionRecord) -> CollectionPlacement:
    """Return what the placement of a collection without one would be: every shard on every process that holds it."""
    shards = []
    for number in range(record.shards):
        names = sorted(await bus.writes.applied(record.id, number))
        every = [PlacedReplica(name, "serving") for name in names]
        shards.append(PlacedShard(number, 0, SPACE, every))
    most = max((len(one.replicas) for one in shards), default=1)
    return CollectionPlacement(
        collection=record.id, shards=shards, replicas=max(most, 1), next_number=record.shards
    )
