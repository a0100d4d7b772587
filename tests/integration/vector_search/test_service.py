from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bus import Bus, NewJob, Notifications
from common.clock import SystemClock
from common.config import SearchConfig
from common.errors import Unavailable
from common.ids import Family, job_id, ulid
from common.registry.collections import Collections
from common.wire.jobs import Work
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.results import Event, decode_result
from common.wire.search import DocumentsWork, SearchWork, Write
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory
from tests.support.bus import matching
from tests.support.servers import Server
from tests.support.vectors import DIMENSION, document, full_disk, write
from tests.support.waiting import until

ROUTER = "router-1"


class Mesh:
    """What a router does, in a few lines, against a real server."""

    def __init__(self, bus: Bus, journal: Notifications) -> None:
        self.bus = bus
        self.journal = journal

    def deadline(self, seconds: float = 20.0) -> int:
        return self.bus.clock.now_ms() + int(seconds * 1000)

    async def create(self, name: str = "docs") -> CollectionRecord:
        record = CollectionRecord(
            id=f"c{ulid()}", tenant="default", name=name, dimension=DIMENSION, metric="cosine"
        )
        assert await Collections(self.bus).create(record)
        return record

    async def put(self, record: CollectionRecord, index: int, *documents: Any, **more: Any) -> str:
        asked = write(index, documents, request=record.id, **more)
        entry = await self.bus.writes.append(record.id, 0, asked)
        done = await self.bus.writes.await_applied(
            record.id, 0, entry, 1, self.journal, self.deadline()
        )
        assert done
        return entry

    async def ask(self, record: CollectionRecord, work: Work, items: int = 1) -> Event:
        family = self.bus.writes.search_family(record.id)
        job = job_id(family, ulid())
        payload = encode(work)
        deadline = self.deadline()
        while True:
            admission = await self.bus.admission.admit(
                [NewJob(job, payload, items, 0)],
                classes=("cpu",),
                router=ROUTER,
                tenant="default",
                deadline_ms=deadline,
            )
            if admission.reason != "no_worker":
                break
            await asyncio.sleep(0.02)
        assert admission.outcome == "admitted"
        return await self.journal.end(job, deadline)

    async def search(self, record: CollectionRecord, vector: Any, **fields: Any) -> list[str]:
        rows = np.atleast_2d(np.asarray(vector, "<f4"))
        work = SearchWork(collection=record.id, vectors=rows.tobytes(), k=3, **fields)
        event = await self.ask(record, work, len(rows))
        assert event.kind == "result", event
        return [hit.id for hit in decode_result(event.data).hits[0]]  # type: ignore[union-attr]


@pytest.fixture
async def mesh(shared_redis: Server, tmp_path: Path) -> AsyncIterator[Mesh]:
    config = SearchConfig(data_dir=str(tmp_path), redis_url=shared_redis.url, log_format="json")
    bus = await Bus.open(config, SystemClock())
    journal = Notifications(bus.connection, ROUTER)
    await journal.start()
    yield Mesh(bus, journal)
    await journal.stop()
    await bus.close()


@pytest.fixture
async def replica(
    mesh: Mesh, shared_redis: Server, tmp_path: Path
) -> AsyncIterator[Callable[..., Any]]:
    """Start a replica in this process; returns a function that stops it."""
    running: list[tuple[asyncio.Event, asyncio.Task[None], Bus]] = []

    async def start(number: int = 0, **fields: Any) -> Callable[[], Any]:
        config = SearchConfig(
            data_dir=str(tmp_path), redis_url=shared_redis.url, drain_s=5, **fields
        )
        bus = await Bus.open(config, SystemClock())
        root = tmp_path / "search" / str(number)
        root.mkdir(parents=True, exist_ok=True)
        one = Replica(ReplicaDirectory(root), bus, config, name=f"r-{number + 1}", cores=1)
        stopping = asyncio.Event()
        task = asyncio.create_task(one.run(stopping))
        running.append((stopping, task, bus))
        async with asyncio.timeout(60):
            await one.ready.wait()

        async def stop() -> None:
            running.remove((stopping, task, bus))
            stopping.set()
            await task
            await bus.close()

        return stop

    yield start
    for stopping, task, bus in running:
        stopping.set()
        await task
        await bus.close()


async def _gone(path: Path) -> bool:
    return not await asyncio.to_thread(path.exists)


async def _registered(mesh: Mesh, record: CollectionRecord) -> bool:
    return await Collections(mesh.bus).get("default", record.name) == record


async def test_a_collection_is_served_from_its_first_write_to_its_end(
    mesh: Mesh, replica: Any, tmp_path: Path
) -> None:
    """Created, written, searched, read, dropped: files and stream are gone, queries hear `collection_not_found`."""
    await replica()
    record = await mesh.create()
    eye = np.eye(DIMENSION)
    entry = await mesh.put(record, 0, document("a", eye[0], "alpha"), document("b", eye[1], "beta"))
    assert (await mesh.search(record, eye[1], after=entry))[0] == "b"
    stats = await mesh.ask(record, DocumentsWork(collection=record.id, op="stats"))
    assert decode_result(stats.data).stats["documents"] == 2  # type: ignore[union-attr,index]
    bad = await mesh.ask(record, SearchWork(collection=record.id, vectors=b"123", k=1))
    assert (bad.kind, bad.code) == ("error", "dimension_mismatch")
    await Collections(mesh.bus).remove(record)
    await mesh.bus.writes.append(record.id, 0, Write(record.id, 1, ROUTER, drop=True))
    await until(lambda: _gone(tmp_path / "search" / "0" / record.id))
    gone = await mesh.ask(record, DocumentsWork(collection=record.id, op="stats"))
    assert (gone.kind, gone.code) == ("error", "collection_not_found")
    assert await matching(mesh.bus, f"*{record.id}*") == []


async def test_its_start_is_the_process_start(mesh: Mesh, replica: Any) -> None:
    """A replica that begins to serve another collection has not started anew: its uptime goes on."""
    await replica()
    started_by = mesh.bus.clock.now_ms()

    async def later() -> bool:
        return mesh.bus.clock.now_ms() > started_by

    await until(later)
    for name in ("first", "second"):
        record = await mesh.create(name)
        family = mesh.bus.writes.search_family(record.id)

        async def served(family: Family = family) -> bool:
            return bool(await mesh.bus.workers.living(family))

        await until(served)
        [worker] = await mesh.bus.workers.living(family)
        assert worker.started_ms <= started_by


async def test_a_restart_goes_on_where_it_stopped(mesh: Mesh, replica: Any) -> None:
    """Writes made while no replica runs are applied, and queries taken, before it is ready."""
    stop = await replica()
    record = await mesh.create()
    await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))
    await stop()
    entry = await mesh.bus.writes.append(
        record.id, 0, write(1, [document("b", np.eye(DIMENSION)[1])], request=record.id)
    )
    await replica()
    assert len(await mesh.bus.workers.living(mesh.bus.writes.search_family(record.id))) == 1
    assert await mesh.bus.writes.applied(record.id, 0) == {"r-1": entry}
    assert sorted(await mesh.search(record, np.ones(DIMENSION))) == ["a", "b"]


async def test_an_emptied_redis_learns_its_collections_again(
    mesh: Mesh, replica: Any, shared_redis: Server
) -> None:
    """After Redis lost everything, collections are registered again, searchable, and writable."""
    await replica()
    record = await mesh.create()
    await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))
    shared_redis.flush()
    await until(lambda: _registered(mesh, record))
    await mesh.put(record, 1, document("b", np.eye(DIMENSION)[1]))
    assert sorted(await mesh.search(record, np.ones(DIMENSION))) == ["a", "b"]


async def test_kill_9_loses_no_acknowledged_write(
    mesh: Mesh, shared_redis: Server, tmp_path: Path
) -> None:
    """The process is killed again and again under writes; every write that was confirmed is there."""
    record = await mesh.create()
    confirmed = 0
    for _ in range(2):
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.vector_search",
            "--data-dir",
            str(tmp_path),
            env={**os.environ, "SPILLWAY_REDIS_URL": shared_redis.url},
            stderr=asyncio.subprocess.DEVNULL,
        )
        for _ in range(20):
            vector = np.eye(DIMENSION)[confirmed % DIMENSION]
            await mesh.put(record, confirmed, document(f"d{confirmed}", vector))
            confirmed += 1
        # One more is on its way when the process dies.
        late = write(confirmed, [document(f"d{confirmed}", np.ones(DIMENSION))], request=record.id)
        await mesh.bus.writes.append(record.id, 0, late)
        confirmed += 1
        child.send_signal(signal.SIGKILL)
        await child.wait()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.vector_search",
        "--data-dir",
        str(tmp_path),
        env={**os.environ, "SPILLWAY_REDIS_URL": shared_redis.url},
        stderr=asyncio.subprocess.DEVNULL,
    )
    work = DocumentsWork(collection=record.id, op="list", limit=1000)
    await mesh.put(record, confirmed, document(f"d{confirmed}", np.ones(DIMENSION)))
    event = await mesh.ask(record, work)
    found = {doc.id for doc in decode_result(event.data).documents}  # type: ignore[union-attr]
    assert found == {f"d{i}" for i in range(confirmed + 1)}
    child.terminate()
    assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_a_full_disk_is_said_and_the_write_follows(
    mesh: Mesh, replica: Any, tmp_path: Path
) -> None:
    """While nothing can be stored a write is answered `disk_full` and queries go on; later it is applied."""
    await replica()
    record = await mesh.create()
    await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))
    with full_disk(30_000):
        with pytest.raises(Unavailable) as caught:
            await mesh.put(record, 1, document("b", np.eye(DIMENSION)[1], "x" * 60_000))
        assert caught.value.code == "disk_full"
        assert await mesh.search(record, np.ones(DIMENSION)) == ["a"]
    third = document("c", np.eye(DIMENSION)[2])

    async def stored() -> bool:
        try:
            await mesh.put(record, 2, third)
        except Unavailable:
            return False
        return True

    await until(stored)
    assert sorted(await mesh.search(record, np.ones(DIMENSION))) == ["a", "b", "c"]


async def test_a_shard_that_cannot_be_opened_is_tried_again(
    mesh: Mesh, replica: Any, tmp_path: Path
) -> None:
    """A shard whose files are away answers queries with why, and is served once they are back."""
    stop = await replica()
    record = await mesh.create()
    await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))
    await stop()
    directory = tmp_path / "search" / "0" / record.id / "0"
    hidden = directory.with_name("hidden")
    directory.rename(hidden)
    directory.write_text("in the way")
    await replica()
    work = DocumentsWork(collection=record.id, op="stats")
    event = await mesh.ask(record, work)
    assert (event.kind, event.code) == ("error", "shard_damaged")
    directory.unlink()
    hidden.rename(directory)

    async def served() -> bool:
        return (await mesh.ask(record, work)).kind == "result"

    await until(served)
    assert await mesh.search(record, np.ones(DIMENSION)) == ["a"]
