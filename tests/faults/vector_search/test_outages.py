from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from common.bus import Bus, Notifications
from common.clock import SystemClock
from common.config import SearchConfig
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory
from tests.integration.vector_search.test_service import ROUTER, Mesh
from tests.support.servers import Server
from tests.support.vectors import DIMENSION, document


async def test_redis_killed_and_back(redis_server: Server, tmp_path: Path) -> None:
    """Redis is killed and started again: what was confirmed is found, and writes and queries go on."""
    config = SearchConfig(data_dir=str(tmp_path), redis_url=redis_server.url, drain_s=5)
    bus, mine = await Bus.open(config, SystemClock()), await Bus.open(config, SystemClock())
    journal = Notifications(mine.connection, ROUTER)
    await journal.start()
    mesh = Mesh(mine, journal)
    stopping = asyncio.Event()
    running = asyncio.create_task(
        Replica(ReplicaDirectory(tmp_path), bus, config, name="r", cores=1).run(stopping)
    )
    record = await mesh.create()
    for turn in range(2):
        vector = np.eye(DIMENSION)[turn]
        await mesh.put(record, turn, document(f"d{turn}", vector))
        assert await mesh.search(record, vector) == [f"d{i}" for i in range(turn, -1, -1)]
        await asyncio.to_thread(redis_server.kill)
        await asyncio.to_thread(redis_server.start)
    await mesh.put(record, 9, document("last", np.ones(DIMENSION)))
    assert (await mesh.search(record, np.ones(DIMENSION)))[0] == "last"
    stopping.set()
    await running
    await journal.stop()
    await bus.close()
    await mine.close()


@pytest.mark.parametrize("ack", [1, 2])
async def test_two_replicas_serve_the_same(shared_redis: Server, tmp_path: Path, ack: int) -> None:
    """Each replica applies every write; with one gone the other answers, and a stream is kept for the one away."""
    config = SearchConfig(data_dir=str(tmp_path), redis_url=shared_redis.url, drain_s=5)
    mine = await Bus.open(config, SystemClock())
    journal = Notifications(mine.connection, ROUTER)
    await journal.start()
    mesh = Mesh(mine, journal)
    record = await mesh.create()
    parts = []
    for name in ("a", "b"):
        bus, stopping = await Bus.open(config, SystemClock()), asyncio.Event()
        one = Replica(ReplicaDirectory(tmp_path / name), bus, config, name=name, cores=1)
        parts.append((bus, stopping, asyncio.create_task(one.run(stopping))))
    for turn in range(5):
        entry = await mesh.put(record, turn, document(f"d{turn}", np.eye(DIMENSION)[turn]))
        if ack == 2:
            applied = await mine.writes.await_applied(
                record.id, 0, entry, 2, journal, mesh.deadline()
            )
            assert applied
            assert await mine.writes.applied(record.id, 0) == {"a": entry, "b": entry}
    for bus, stopping, task in parts:
        found = await mesh.search(record, np.eye(DIMENSION)[4], after=entry)
        assert found[0] == "d4"
        stopping.set()
        await task
        await bus.close()
    await journal.stop()
    await mine.close()
