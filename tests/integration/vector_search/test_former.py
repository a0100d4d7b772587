from __future__ import annotations

from typing import Any

import numpy as np

from common.wire.message import encode
from common.wire.registry import CollectionRecord
from tests.integration.vector_search.test_service import Mesh, mesh, replica
from tests.support.bus import matching
from tests.support.vectors import DIMENSION, document, write
from tests.support.waiting import until

__all__ = ["mesh", "replica"]


async def _put_back(mesh: Mesh, record: CollectionRecord) -> None:
    """Lay a collection's keys out as the last version did, by literal commands; nothing of today's is left."""
    new, old, call = "{search/0}", "{search." + record.id + "/0}", mesh.bus.connection.call
    for entry, flat in await call("XRANGE", f"{new}:writes:{record.id}/0", "-", "+"):
        await call("XADD", f"{old}:writes", entry, *flat)
    for name in ("applied", "snapshots"):
        rows = await call("HGETALL", f"{new}:{name}:{record.id}/0")
        if rows:
            await call("HSET", f"{old}:{name}", *rows)
    await call("HSET", f"{old}:use", "cpu:items", 0, "cpu:tokens", 0)
    for name in await matching(mesh.bus, "{search/0}*"):
        await call("DEL", name)
    await call("DEL", "{collections}:changes", "{collections}:partitions")


async def test_a_start_takes_over_the_former_layout(mesh: Mesh, replica: Any) -> None:
    """Files and streams of the last version: what was applied stays, what was only accepted is applied, in order."""
    stop = await replica()
    record = await mesh.create()
    first = await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0], "old"))
    await stop()
    await _put_back(mesh, record)
    writes = [
        write(1, [document("a", np.eye(DIMENSION)[1], "new")], request=record.id),
        write(2, [document("b", np.eye(DIMENSION)[2])], request=record.id),
        write(3, [], ["b"], request=record.id),
        write(4, [document("c", np.eye(DIMENSION)[3])], request=record.id),
    ]
    stream = "{search." + record.id + "/0}:writes"
    entries = [
        (await mesh.bus.connection.call("XADD", stream, "*", "w", encode(w))).decode()
        for w in writes
    ]
    assert first < entries[0]

    await replica()

    async def told() -> bool:  # a replica is ready a moment before it has told how far it is
        return await mesh.bus.writes.applied(record.id, 0) == {"r-1": entries[-1]}

    await until(told)
    assert sorted(await mesh.search(record, np.ones(DIMENSION))) == ["a", "c"]
    assert (await mesh.search(record, np.eye(DIMENSION)[1]))[0] == "a"
    assert await matching(mesh.bus, "{search.*") == []
    again = await mesh.put(record, 5, document("d", np.eye(DIMENSION)[4]))
    assert (await mesh.search(record, np.eye(DIMENSION)[4], after=again))[0] == "d"
