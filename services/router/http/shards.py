"""The shards of a collection: their replicas, and the operations that change their placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from common.bus import Bus
from common.errors import Conflict, NotFound, SpillwayError, Unprocessable
from common.registry import placement_plan
from common.registry.collections import Collections
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
from services.router.text.bodies import DropReplicaBody, MoveShardBody, ReplicasBody, decode

SHARDS = "/v1/collections/{name}/shards"


class ShardsApi:
    """Lists the shards of a tenant's collection, and changes its placement, which vector_search then carries out."""

    def __init__(self, receiver: Receiver, records: TenantRecords, bus: Bus) -> None:
        self._receiver, self._records, self._bus = receiver, records, bus
        self._placements, self._collections = Placements(bus), Collections(bus)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(SHARDS, self.list_all),
            web.post(SHARDS + "/{shard}/split", self.split),
            web.post(SHARDS + "/{shard}/move", self.move),
            web.post(SHARDS + "/{shard}/drop", self.drop),
            web.post(SHARDS + "/{shard}/reset", self.reset),
            web.post("/v1/collections/{name}/replicas", self.replicas),
        ]

    async def list_all(self, request: web.Request) -> web.Response:
        """List the shards with their ranges, replicas and sizes, and the shards that nobody serves."""
        record = await self._records.collection(request)
        placement = await self._placements.get(record.id)
        if placement is None:
            placement = await spread_of(self._bus, record)
        return reply_json(await self._shown(record, placement))

    async def split(self, request: web.Request) -> web.Response:
        """Begin to split a shard into two."""
        record, number = await self._records.collection(request), _number(request)
        if await self._collections.reembedding(record):
            raise Conflict(
                f"collection {record.name!r} is being re-embedded; split it when that is done",
                code="collection_busy",
            )
        return await self._changed(record, lambda known: placement_plan.split_begun(known, number))

    async def move(self, request: web.Request) -> web.Response:
        """Begin to fill a new replica of a shard, which then replaces another replica or is added."""
        record, raw = await self._records.collection(request), await self._receiver.body(request)
        body = decode(raw, MoveShardBody) if raw.strip() else MoveShardBody()
        number = _number(request)
        processes = await processes_of(self._bus, record)
        if body.target is not None and body.target not in {each.name for each in processes}:
            raise _unknown(body.target, processes)

        def moved(known: CollectionPlacement) -> CollectionPlacement:
            target = body.target or _chosen(placement_plan.shard(known, number), processes)
            return placement_plan.moved(known, number, body.source or "", target)

        return await self._changed(record, moved)

    async def drop(self, request: web.Request) -> web.Response:
        """Remove one replica of a shard that another replica serves."""
        record = await self._records.collection(request)
        body = decode(await self._receiver.body(request), DropReplicaBody)
        number = _number(request)
        return await self._changed(
            record, lambda known: placement_plan.removed(known, number, body.replica)
        )

    async def reset(self, request: web.Request) -> web.Response:
        """Replace a shard that no living process serves by an empty one: its documents are lost."""
        record, number = await self._records.collection(request), _number(request)
        processes = await processes_of(self._bus, record)
        living = {process.name for process in processes}

        def anew(known: CollectionPlacement) -> CollectionPlacement:
            one = placement_plan.shard(known, number)
            if any(each.state == "serving" and each.name in living for each in one.replicas):
                raise Conflict(
                    f"shard {number} is served: nothing is lost, and nothing is given up",
                    code="shard_busy",
                )
            return placement_plan.anew(known, number, _chosen(one, processes, lost=True))

        return await self._changed(record, anew)

    async def replicas(self, request: web.Request) -> web.Response:
        """Set the number of replicas of each shard."""
        record = await self._records.collection(request)
        body = decode(await self._receiver.body(request), ReplicasBody)
        processes = await processes_of(self._bus, record)
        if len(processes) < body.replicas:
            raise placement_plan.too_few(body.replicas, len(processes))
        return await self._changed(
            record,
            lambda known: placement_plan.completed(known, body.replicas, processes, {}),
        )

    async def _changed(
        self,
        record: CollectionRecord,
        change: Callable[[CollectionPlacement], CollectionPlacement],
    ) -> web.Response:
        """Change a collection's placement, after creating it if there is none, and reply with the shards."""
        if not record.placed:
            record = await self._placed(record)
        placement = await self._placements.update(record.id, change)
        if placement is None:
            raise Conflict(
                f"collection {record.name!r} was deleted or replaced", code="collection_changed"
            )
        return reply_json(await self._shown(record, placement))

    async def _placed(self, record: CollectionRecord) -> CollectionRecord:
        """Store a collection's actual placement: its only shard on every process that holds the shard."""
        if record.shards != 1:
            raise Unprocessable(
                f"collection {record.name!r} has {record.shards} shards and no placement: its documents are not "
                "divided by ranges of hashes; re-create it with `shards`",
                code="unprocessable",
            )
        await self._placements.put(await spread_of(self._bus, record))
        if not await self._collections.mark_placed(record):
            raise Conflict(
                f"collection {record.name!r} was deleted or replaced", code="collection_changed"
            )
        return msgspec.structs.replace(record, placed=True)

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
    """Return a shard in the form that clients see."""
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


def _number(request: web.Request) -> int:
    text = request.match_info["shard"]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise NotFound(
            f"no shard {text[:40]!r}: expected the number of a shard", code="shard_not_found"
        )
    return int(text)


def _chosen(one: PlacedShard, processes: Sequence[ProcessLoad], *, lost: bool = False) -> str:
    """Return a process for a shard, other than its present holders; for a `lost` shard any process will do."""
    holders = () if lost else tuple(each.name for each in one.replicas)
    need = placement_plan.ShardNeed(one.number, 0, holders)
    added = placement_plan.assign(processes, [need], len(holders) + 1)[one.number]
    if not added:
        raise placement_plan.too_few(len(holders) + 1, len(processes))
    return added[0]


def _unknown(name: str, processes: Sequence[ProcessLoad]) -> SpillwayError:
    there = ", ".join(process.name for process in processes)
    return Unprocessable(
        f"to is {name!r}: expected a vector_search process that lives: {there or 'none does'}",
        code="unprocessable",
        param="to",
    )


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
    """Return the actual placement of a collection without a stored one: each shard on all processes that hold it."""
    shards = []
    for number in range(record.shards):
        names = sorted(await bus.writes.applied(record.id, number))
        every = [PlacedReplica(name, "serving") for name in names]
        shards.append(PlacedShard(number, 0, SPACE, every))
    most = max((len(one.replicas) for one in shards), default=1)
    return CollectionPlacement(
        collection=record.id, shards=shards, replicas=max(most, 1), next_number=record.shards
    )
