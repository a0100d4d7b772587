"""What collections cost that nobody writes to or searches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from common.bus import Bus, Notifications
from common.bus.keys import CHANGES
from common.clock import SystemClock
from common.config import SearchConfig
from common.registry.collections import Collections
from common.wire.registry import CollectionRecord
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory
from tests.integration.vector_search.test_service import ROUTER, Mesh
from tests.support.servers import Server
from tests.support.vectors import DIMENSION, document

FEW, MANY = 10, 300
TURNS = 12


class Turns:
    """Counts how often the registry is asked for changes: the replica's own measure of time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self._turned = asyncio.Event()
        changes = Collections.changes

        async def counted(collections: Collections) -> bytes | None:
            self._count += 1
            self._turned.set()
            return await changes(collections)

        monkeypatch.setattr(Collections, "changes", counted)

    async def pass_by(self, turns: int) -> None:
        """Wait until so many turns have gone by."""
        goal = self._count + turns
        async with asyncio.timeout(60):
            while self._count < goal:
                self._turned.clear()
                await self._turned.wait()


class Idle(NamedTuple):
    """What an idle replica costs: commands in TURNS turns, and the fewest tasks seen at a turn."""

    commands: int
    tasks: int


async def _commands(bus: Bus) -> int:
    raw = (await bus.connection.call("INFO", "commandstats")).decode()
    lines = [line for line in raw.splitlines() if line.startswith("cmdstat_")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines)


async def _idle(turns: Turns, mine: Bus) -> Idle:
    before, tasks = await _commands(mine), []
    for _ in range(TURNS):
        await turns.pass_by(1)
        tasks.append(len(asyncio.all_tasks()))
    return Idle(await _commands(mine) - before, min(tasks))


async def _create(mesh: Mesh, numbers: range) -> list[CollectionRecord]:
    records = [await mesh.create(f"c{number}") for number in numbers]
    for record in records:
        await _served(mesh.bus, record)
    return records


async def _served(bus: Bus, record: CollectionRecord) -> None:
    async with asyncio.timeout(240):
        while not await bus.writes.applied(record.id, 0):  # noqa: ASYNC110 - another bus' state has no event
            await asyncio.sleep(0.05)


async def test_idle_collections_cost_nothing(
    shared_redis: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 idle collections cost as many commands and tasks as ten, and one of them is written and searched at once."""
    config = SearchConfig(data_dir=str(tmp_path), redis_url=shared_redis.url, drain_s=5)
    turns = Turns(monkeypatch)
    bus, mine = await Bus.open(config, SystemClock()), await Bus.open(config, SystemClock())
    journal = Notifications(mine.connection, ROUTER)
    await journal.start()
    mesh = Mesh(mine, journal)
    replica, stopping = (
        Replica(ReplicaDirectory(tmp_path), bus, config, name="r", cores=1),
        asyncio.Event(),
    )
    running = asyncio.create_task(replica.run(stopping))
    await _create(mesh, range(FEW))
    few = await _idle(turns, mine)
    records = await _create(mesh, range(FEW, MANY))
    many = await _idle(turns, mine)
    assert few.commands >= TURNS  # the registry's count alone
    assert many.commands <= 1.5 * few.commands + TURNS
    assert many.tasks <= few.tasks + 5

    entry = await mesh.put(records[7], 0, document("a", np.eye(DIMENSION)[0]))
    assert await mesh.search(records[7], np.eye(DIMENSION)[0], after=entry) == ["a"]
    assert len(await mine.workers.living(mine.writes.search_family(records[7].id))) == 1
    stopping.set()
    await running
    await journal.stop()
    await bus.close()
    await mine.close()


async def test_the_registry_is_read_when_it_changed(
    shared_redis: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns without a change read the mark of changes and not the records; a change is seen by the next turns."""
    config = SearchConfig(data_dir=str(tmp_path), redis_url=shared_redis.url, drain_s=5)
    turns = Turns(monkeypatch)
    bus, mine = await Bus.open(config, SystemClock()), await Bus.open(config, SystemClock())
    read = 0
    every = Collections.all

    async def counted(
        collections: Collections, tenant: str | None = None
    ) -> list[CollectionRecord]:
        nonlocal read
        read += 1
        return await every(collections, tenant)

    monkeypatch.setattr(Collections, "all", counted)
    replica, stopping = (
        Replica(ReplicaDirectory(tmp_path), bus, config, name="r", cores=1),
        asyncio.Event(),
    )
    running = asyncio.create_task(replica.run(stopping))
    record = CollectionRecord(
        id="c1", tenant="default", name="docs", dimension=DIMENSION, metric="cosine"
    )
    assert await Collections(mine).create(record)
    await _served(mine, record)
    await turns.pass_by(2)
    before, mark = read, await mine.connection.call("GET", CHANGES)
    await turns.pass_by(TURNS)
    assert read <= before + 1  # every half minute, should a change not have been said
    assert await mine.connection.call("GET", CHANGES) == mark
    stopping.set()
    await running
    await bus.close()
    await mine.close()
