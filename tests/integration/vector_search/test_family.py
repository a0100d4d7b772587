"""All collections are served from the lanes of one family, on a Cluster of several; each for itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bus import Bus, Notifications
from common.clock import SystemClock
from common.config import SearchConfig
from common.errors import Unavailable
from common.wire.results import decode_result
from common.wire.search import DocumentsWork
from common.worker.leases import Lease
from common.worker.outbox import Outbox
from services.vector_search import family_server
from services.vector_search.family_server import FamilyServer, SearchCosts
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory
from services.vector_search.shard import Shard
from tests.integration.vector_search.test_service import ROUTER, Mesh, mesh, replica
from tests.support.servers import Cluster
from tests.support.vectors import DIMENSION, document
from tests.support.waiting import until

__all__ = ["mesh", "replica"]


async def test_a_job_waits_for_its_collection(mesh: Mesh, replica: Any) -> None:
    """A job may come before its replica knows of the collection, which is opened for it; none there is says so."""
    await replica()
    records = [await mesh.create(f"c{n}") for n in range(4)]
    work = [DocumentsWork(collection=record.id, op="stats") for record in records]
    pairs = zip(records, work, strict=True)
    answers = await asyncio.gather(*(mesh.ask(record, one) for record, one in pairs))
    assert [answer.kind for answer in answers] == ["result"] * 4
    unknown = await mesh.ask(records[0], DocumentsWork(collection="nothing", op="stats"))
    assert (unknown.kind, unknown.code) == ("error", "collection_not_found")
    shard = await mesh.ask(records[0], DocumentsWork(collection=records[0].id, op="stats", shard=1))
    assert (shard.kind, shard.code) == ("error", "collection_not_found")


async def test_a_damaged_shard_is_its_own(mesh: Mesh, replica: Any, tmp_path: Path) -> None:
    """Jobs of a collection whose files cannot be read hear so; those beside it in the lane are answered."""
    stop = await replica()
    good, bad = await mesh.create("good"), await mesh.create("bad")
    for record in (good, bad):
        await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))
    await stop()
    directory = tmp_path / "search" / "0" / bad.id / "0"
    directory.rename(directory.with_name("hidden"))
    directory.write_text("in the way")
    await replica()
    asked = [DocumentsWork(collection=r.id, op="stats") for r in (good, bad) * 3]
    answers = await asyncio.gather(*(mesh.ask(good, work) for work in asked))
    assert [a.kind for a in answers] == ["result", "error"] * 3
    assert {a.code for a in answers if a.kind == "error"} == {"shard_damaged"}
    entry = await mesh.put(good, 1, document("b", np.eye(DIMENSION)[1]))
    assert (await mesh.search(good, np.eye(DIMENSION)[1], after=entry))[0] == "b"


async def test_a_failing_search_is_its_own(
    mesh: Mesh, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks inside one collection's search answers its jobs, and the loop goes on with all others."""
    await replica()
    good, bad = await mesh.create("good"), await mesh.create("bad")
    for record in (good, bad):
        await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))
    search = Shard.search

    def failing(self: Shard, work: Any, spent_s: float = 0.0) -> Any:
        if self.record.id == bad.id:
            raise ZeroDivisionError
        return search(self, work, spent_s)

    monkeypatch.setattr(Shard, "search", failing)
    for _ in range(2):
        broken = [mesh.search(bad, np.eye(DIMENSION)[0]) for _ in range(3)]
        told = await asyncio.gather(*broken, return_exceptions=True)
        assert all("search_failed" in str(error) for error in told), told
        assert await mesh.search(good, np.eye(DIMENSION)[0]) == ["a"]


async def test_a_shard_that_moved_answers_from_its_holder(
    mesh: Mesh, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search whose shard left its process while the job waited there is answered by one that holds the shard."""
    for number in range(2):
        await replica(number)
    record, moved = await mesh.create("moved"), 0
    entry = await mesh.put(record, 0, document("a", np.eye(DIMENSION)[0]))

    async def everywhere() -> bool:
        applied = await mesh.bus.writes.applied(record.id, 0)
        return list(applied.values()) == [entry] * 2

    await until(everywhere, "the document on both")
    search = Shard.search

    def moving(self: Shard, work: Any, spent_s: float = 0.0) -> Any:
        nonlocal moved
        if self.directory.parents[1].name == "0":
            moved += 1
            raise Unavailable("the shard is elsewhere", code="shard_missing")
        return search(self, work, spent_s)

    monkeypatch.setattr(Shard, "search", moving)

    async def asked() -> bool:
        found = await asyncio.gather(*(mesh.search(record, np.eye(DIMENSION)[0]) for _ in range(8)))
        assert found == [["a"]] * 8
        return moved > 0

    await until(asked, "a search of the process that the shard left")


async def test_a_refusal_that_fails_is_its_own(
    mesh: Mesh, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose refusal fails unexpectedly is delivered again and answered, and the loop goes on meanwhile."""
    await replica()
    record, failed = await mesh.create("here"), list[str]()
    refuse = Outbox.refuse

    async def failing(outbox: Outbox, lease: Lease, *more: Any, **words: Any) -> Any:
        if not failed:
            failed.append(lease.job)
            raise ZeroDivisionError
        return await refuse(outbox, lease, *more, **words)

    monkeypatch.setattr(Outbox, "refuse", failing)
    unknown = await mesh.ask(record, DocumentsWork(collection="nothing", op="stats"))
    assert (unknown.kind, unknown.code) == ("error", "collection_not_found")
    assert len(failed) == 1
    stats = await mesh.ask(record, DocumentsWork(collection=record.id, op="stats"))
    assert stats.kind == "result"


async def test_costs_are_measured_again_once_a_shard_is_indexed(
    mesh: Mesh, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A depth that was measured while a shard was loaded does not stay: it would refuse what fits later."""
    measured = list[SearchCosts]()
    measure = FamilyServer._measure

    async def noted(server: FamilyServer, shard: Shard | None) -> SearchCosts:
        costs = await measure(server, shard)
        measured.append(costs)
        return costs

    monkeypatch.setattr(family_server, "_LOOK_S", 0.02)
    monkeypatch.setattr(FamilyServer, "_measure", noted)
    await replica(exact_below=64)
    record = await mesh.create("loaded")
    rng = np.random.default_rng(1)
    for n in range(80):
        await mesh.put(record, n, document(f"d{n}", rng.standard_normal(DIMENSION)))

    family = mesh.bus.writes.search_family(record.id)

    async def told() -> bool:
        last = measured[-1]
        (now,) = (await mesh.bus.workers.records(family)).values()
        costs = now.depth_items, now.alpha_items_s, now.beta_s
        return last.path == "graph" and costs == (last.depth_items, last.alpha_s, last.beta_s)

    await until(told, "a record with costs that were measured with the graph")


@pytest.mark.parametrize(
    ("chunks", "newer", "path", "outdated"),
    [
        pytest.param(60_000, 30_000, "graph", False, id="as it was"),
        pytest.param(119_000, 60_000, "graph", False, id="more that waits"),
        pytest.param(121_000, 30_000, "graph", True, id="twice the chunks"),
        pytest.param(60_000, 14_000, "graph", True, id="most is taken in"),
        pytest.param(60_000, 30_000, "exact", True, id="searched in another way"),
    ],
)
def test_costs_of_a_shard_that_changed_are_outdated(
    chunks: int, newer: int, path: str, *, outdated: bool
) -> None:
    """So are they if it doubled, if its index took in what it lacked, or if it is searched in another way."""
    costs = SearchCosts(chunks=60_000, newer=30_000, path="graph")
    assert costs.outdated(chunks, newer, path) is outdated
    assert not SearchCosts(chunks=60_000, newer=900, path="graph").outdated(60_000, 0, "graph")


async def test_every_family_of_a_cluster(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Collections of several families are written, searched, and found again after a restart."""
    config = SearchConfig(
        data_dir=str(tmp_path), redis_url=shared_cluster.url, redis_cluster=True, drain_s=5
    )
    mine = await Bus.open(config, SystemClock())
    journal = Notifications(mine.connection, ROUTER)
    await journal.start()
    mesh = Mesh(mine, journal)
    records = [await mesh.create(f"c{n}") for n in range(8)]
    assert len({mine.writes.search_family(record.id) for record in records}) > 1
    for turn in range(2):
        bus, stopping = await Bus.open(config, SystemClock()), asyncio.Event()
        one = Replica(ReplicaDirectory(tmp_path), bus, config, name="r", cores=1)
        running = asyncio.create_task(one.run(stopping))
        vector = np.eye(DIMENSION)[turn]
        entries = [await mesh.put(r, turn, document(f"d{turn}", vector)) for r in records]
        for record, entry in zip(records, entries, strict=True):
            assert (await mesh.search(record, vector, after=entry))[0] == f"d{turn}"
            stats = await mesh.ask(record, DocumentsWork(collection=record.id, op="stats"))
            told = decode_result(stats.data)
            assert told.stats["documents"] == turn + 1  # type: ignore[union-attr,index]
        stopping.set()
        await running
        await bus.close()
    await journal.stop()
    await mine.close()
