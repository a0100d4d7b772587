"""Migration from the former layout of keys, in which each shard had a family, `{search.<collection>/<shard>}`.

Every step may be repeated: data already copied stay, and the former keys are deleted last.
"""

from __future__ import annotations

from itertools import chain

from redis.exceptions import ResponseError

from common import log
from common.bus import Bus, keys
from common.ids import Family
from common.redis.replies import hash_of

_ENTRIES_AT_ONCE = 8  # entries may have some megabytes each
_log = log.get("bus")


async def adopt_former(bus: Bus, collection: str, shard: int) -> bool:
    """Move a shard's data from its former keys to today's and delete the former keys; False if there are none.

    Writes keep their ids and their order, also among newer writes. This must be done before the shard's writes are
    read. Jobs in the former lanes end as cancelled.
    """
    if not await _there(bus, collection, shard):
        return False
    copied = await _copy_writes(bus, collection, shard)
    await _copy_registers(bus, collection, shard)
    await remove_former(bus, collection, shard)
    _log.warning("former_keys_adopted", collection=collection, shard=shard, writes=copied)
    return True


async def remove_former(bus: Bus, collection: str, shard: int) -> None:
    """Delete a shard's former keys, if there are any, and end the jobs in its former lanes."""
    if not await _there(bus, collection, shard):
        return
    family = keys.former_family(collection, shard)
    for cls in await _classes(bus, family):
        await _end_jobs(bus, family, cls)
        await bus.connection.call("DEL", keys.lane(family, cls))
    for name in (
        "plan",
        "depths",
        "room",
        "blocked",
        "workers",
        "use",
        "snapshots",
        "applied",
        "writes",
    ):
        await bus.connection.call("DEL", keys.former(collection, shard, name))


async def _there(bus: Bus, collection: str, shard: int) -> bool:
    kinds = ("writes", "applied", "snapshots", "use", "workers")
    names = [keys.former(collection, shard, kind) for kind in kinds]
    return bool(await bus.connection.call("EXISTS", *names))


async def _copy_writes(bus: Bus, collection: str, shard: int) -> int:
    source = keys.former(collection, shard, "writes")
    target = keys.writes(bus.writes.search_family(collection), collection, shard)
    after, copied = "-", 0
    while rows := await bus.connection.call(
        "XRANGE", source, after, "+", "COUNT", _ENTRIES_AT_ONCE
    ):
        sound = [(entry, flat[1]) for entry, flat in rows if flat[0] == b"w"]
        copied += int(
            await bus.connection.script("merge", [target], list(chain.from_iterable(sound)))
        )
        after = f"({rows[-1][0].decode()}"
    return copied


async def _copy_registers(bus: Bus, collection: str, shard: int) -> None:
    """Copy the ids of the last writes that each replica had applied and saved; newer ids of a replica stay."""
    family = bus.writes.search_family(collection)
    for name, key in (("applied", keys.applied), ("snapshots", keys.snapshots)):
        rows = hash_of(await bus.connection.call("HGETALL", keys.former(collection, shard, name)))
        for replica, entry in rows.items():
            await bus.connection.call("HSETNX", key(family, collection, shard), replica, entry)


async def _classes(bus: Bus, family: Family) -> list[str]:
    """Return the lanes that a former family may have: the shared ones, and the own lanes of its workers."""
    used = hash_of(await bus.connection.call("HGETALL", keys.use(family)))
    counted = {name.decode().rsplit(":", 1)[0] for name in used if b":" in name}
    workers = hash_of(await bus.connection.call("HGETALL", keys.workers(family)))
    return sorted({"cpu", *counted, *(keys.own(name.decode()) for name in workers)})


async def _end_jobs(bus: Bus, family: Family, cls: str) -> None:
    """End the jobs of a lane as cancelled, leases of dead workers included."""
    lane = keys.lane(family, cls)
    try:
        # Without the group no job is leased any more, so each one can be removed.
        await bus.connection.call("XGROUP", "DESTROY", lane, keys.GROUP)
    except ResponseError as error:
        if "requires the key to exist" not in str(error):
            raise
        return
    for _, flat in await bus.connection.call("XRANGE", lane, "-", "+"):
        job = dict(zip(flat[::2], flat[1::2], strict=True)).get(b"j")
        if job is not None:
            await bus.control.cancel(job.decode())
