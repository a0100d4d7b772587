"""The bus while its server is killed, stopped, made read-only, filled, or away for longer than a heartbeat lives."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.bus import Admission, Bus, BusDown, BusFull, NewJob, Notifications, keys
from common.clock import SystemClock
from common.config import Common
from common.ids import Family, job_id, ulid
from common.registry.idempotency import Idempotency
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.worker import Worker
from tests.conftest import PROFILE
from tests.support.bus import (
    EMBED,
    RESULT,
    Hand,
    admit,
    differences,
    must,
    new_job,
    open_bus,
    outcome,
    reached,
    record,
    state,
)
from tests.support.servers import KINDS, Cluster, Server

every = pytest.mark.parametrize(
    "redis_server", KINDS if PROFILE == "soak" else ("valkey",), indirect=True
)
everywhere = pytest.mark.parametrize("redis_server", KINDS, indirect=True)


@pytest.fixture(autouse=True)
def _cut_connections() -> Iterator[None]:
    """redis-py leaves streams unclosed that were cut while it set them up: collect them here, in silence."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Mesh:
    """Workers with all their loops, a router's journal, and what became of every job."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.journal = Notifications(bus.connection, "r1")
        self.accepted: list[NewJob] = []
        self.refused: list[Admission | Exception] = []
        self.generations = 0
        self.worked = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.Task[Event]] = []
        self.consumers: list[Worker] = []

    async def add(self, name: str, *classes: str) -> Worker:
        """Start a worker that finishes all it reads while `hold` is set."""
        made = Worker(self.bus, EMBED, record(name, *classes), largest_items=1, largest_tokens=10)
        await made.start()
        self.consumers.append(made)
        self._tasks.append(asyncio.create_task(self._work(made)))
        return made

    async def _work(self, consumer: Worker) -> None:
        while True:
            leases = await consumer.reader.read(8, 80)
            await self.hold.wait()
            try:
                stop = await consumer.outbox.emit(leases)
                await asyncio.gather(
                    *(self._finish(consumer, x) for x in leases if x.job not in stop)
                )
            except BusDown:
                continue

    async def _finish(self, consumer: Worker, lease: Lease) -> None:
        if await consumer.outbox.finish(lease, RESULT) in {"ok", "done"}:
            self.worked += 1

    async def offer(self, count: int, pause_s: float = 0.0, left_s: float = 60.0) -> None:
        """Admit jobs, and await the outcome of each accepted one."""
        for _ in range(count):
            job = new_job()
            try:
                admission = await admit(self.bus, job, left_s=left_s)
            except BusDown as error:
                self.refused.append(error)
                continue
            if admission.outcome == "refused":
                self.refused.append(admission)
            else:
                self.accepted.append(job)
                end = self.journal.end(job.id, self.bus.clock.now_ms() + int(left_s * 1000))
                self._ends.append(asyncio.create_task(end))
            await asyncio.sleep(pause_s)

    async def offer_until(self, count: int) -> None:
        """Admit jobs until `count` were accepted in all: who is refused asks again."""
        while len(self.accepted) < count:
            await self.offer(count - len(self.accepted))
            await asyncio.sleep(0.05)

    async def outcomes(self) -> list[str]:
        """Wait for the outcome of everything accepted."""
        return [event.kind for event in await asyncio.gather(*self._ends)]

    async def close(self) -> None:
        """Stop everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for consumer in self.consumers:
            await consumer.drain()
            await consumer.stop()
        await self.journal.stop()


@asynccontextmanager
async def mesh(url: str, tmp_path: Path, *, cluster: bool = False) -> AsyncIterator[Mesh]:
    """A mesh on one server."""
    bus = await open_bus(url, str(tmp_path), cluster=cluster)
    made = Mesh(bus)
    try:
        yield made
        await made.close()
    finally:
        await bus.close()


@every
async def test_killed_under_load(redis_server: Server, tmp_path: Path) -> None:
    """kill -9 of the server, again and again under load: every accepted job gives its result, none is charged."""
    async with mesh(redis_server.url, tmp_path) as m:
        await m.add("gpu-a")
        await m.add("gpu-b")
        load = asyncio.create_task(m.offer(150, 0.01))
        for _ in range(3):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(redis_server.restart)
        await load
        assert await m.outcomes() == ["result"] * len(m.accepted)
        assert len(m.accepted) == 150
        for job in m.accepted:
            assert (await outcome(m.bus, job)).kind == "result"
            found = await m.bus.jobs.get(job.id)
            assert found is not None
            assert found.suspicions == 0
        assert [c.generation for c in m.consumers] == [0, 0]
        assert await differences(m.bus) == []
        assert (await m.bus.lanes.use(EMBED))["gpu"] == (0, 0)


@pytest.mark.soak
async def test_cluster_node_killed_under_load(redis_cluster: Cluster, tmp_path: Path) -> None:
    """kill -9 and restart of the node that holds the family: nothing acknowledged is lost."""
    async with mesh(redis_cluster.url, tmp_path, cluster=True) as m:
        await m.add("gpu-a")
        load = asyncio.create_task(m.offer(60, 0.01))
        await asyncio.sleep(0.3)
        slot = redis_cluster.servers[0].command("CLUSTER", "KEYSLOT", keys.use(EMBED))
        owner = redis_cluster.servers[slot * 3 // 16384]
        await asyncio.to_thread(owner.restart)
        await load
        assert await m.outcomes() == ["result"] * len(m.accepted)
        assert len(m.accepted) + len(m.refused) == 60
        assert await differences(m.bus) == []


async def test_paused(redis_server: Server, tmp_path: Path) -> None:
    """A server that stands still for longer than a heartbeat lives: workers begin anew, jobs run, none is charged."""
    async with mesh(redis_server.url, tmp_path) as m:
        await m.add("gpu-a")
        await m.add("gpu-b")
        m.hold.clear()
        await m.offer(20)
        await asyncio.sleep(0.3)
        redis_server.pause()
        await asyncio.sleep(5.6)
        redis_server.resume()
        m.hold.set()
        assert await m.outcomes() == ["result"] * 20
        for job in m.accepted:
            found = await m.bus.jobs.get(job.id)
            assert found is not None
            assert found.suspicions == 0
        assert m.worked == 20
        assert await differences(m.bus) == []


@every
async def test_read_only(redis_server: Server, tmp_path: Path) -> None:
    """A server that takes no writes counts as away: BusDown for new work, and it recovers by itself."""
    async with mesh(redis_server.url, tmp_path) as m:
        await m.add("gpu-a")
        await m.offer(5)
        assert await m.outcomes() == ["result"] * 5
        redis_server.command("REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(BusDown):
            await m.bus.connection.call("SET", "x", "1", timeout_s=0.2)
        with pytest.raises(BusDown):
            await m.bus.connection.script(
                "cancel", [keys.use(EMBED)] * 5, ["x", "gpu"], timeout_s=0.2
            )
        assert not m.bus.connection.reachable
        redis_server.command("REPLICAOF", "NO", "ONE")
        await m.offer(5)
        assert await m.outcomes() == ["result"] * 10


async def test_emptied(redis_server: Server, tmp_path: Path) -> None:
    """A server that lost everything: workers register anew by themselves, and new work runs."""
    async with mesh(redis_server.url, tmp_path) as m:
        await m.add("gpu-a")
        await m.offer(3)
        assert await m.outcomes() == ["result"] * 3
        redis_server.flush()
        for _ in range(100):
            if await m.bus.workers.living(EMBED):
                break
            await asyncio.sleep(0.1)
        await m.offer(3)
        assert await m.outcomes() == ["result"] * 6
        assert m.consumers[0].generation == 1


def fill(server: Server) -> None:
    """Let a server have used more than it may: it refuses every command that could need memory."""
    server.config_set("maxmemory", 100_000)


def empty(server: Server) -> None:
    """Give it room again."""
    server.config_set("maxmemory", 0)


@every
async def test_full(redis_server: Server, tmp_path: Path) -> None:
    """Filled under load: running jobs finish, new ones are refused as bus_full, nobody is reaped; then it recovers."""
    async with mesh(redis_server.url, tmp_path) as m:
        await m.add("gpu-a")
        m.hold.clear()
        await m.offer(6)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(fill, redis_server)
        job = new_job()
        full = await admit(m.bus, job)
        assert (full.outcome, full.reason) == ("refused", "bus_full")
        assert full.retry_after_s > 0
        assert await m.bus.jobs.get(job.id) is None
        assert (await admit(m.bus, m.accepted[0])).outcome == "exists"
        with pytest.raises(BusFull):
            await Idempotency(m.bus).claim("t", "k", b"h", job_id(Family("request"), ulid()))
        m.hold.set()
        assert await m.outcomes() == ["result"] * 6
        await asyncio.sleep(1.2)
        assert [c.generation for c in m.consumers] == [0]
        assert await differences(m.bus) == []
        assert [w.worker for w in await m.bus.workers.living(EMBED)] == ["gpu-a"]
        await asyncio.to_thread(empty, redis_server)
        await m.offer_until(9)  # the next heartbeat tells that there is room
        assert await m.outcomes() == ["result"] * 9


@everywhere
async def test_every_script_at_the_limit(redis_server: Server, tmp_path: Path) -> None:
    """On a server with no byte left: emit, finish, fail, cancel, hand-over, settling, beats and starts all work."""
    bus = await open_bus(redis_server.url, str(tmp_path))
    a, b = await Hand(bus, EMBED, "a").join(), await Hand(bus, EMBED, "b").join()
    jobs = await must(bus, *(new_job() for _ in range(6)))
    leases = [x for _ in range(5) for x in await a.pull()]
    fill(redis_server)
    assert (await a.beat())[0] == "ok"
    assert await a.step([leases[0]], {jobs[0].id: Event(index=0, kind="progress")}) == set()
    assert await a.finish(leases[0], RESULT, index=1) == "ok"
    assert await a.fail(leases[1], "x", "y") == "returned"
    assert await bus.control.cancel(jobs[2].id) == "flagged"
    assert await bus.control.cancel(jobs[5].id) == "removed"
    await a.give_back([leases[3]])
    fresh = await Hand(bus, EMBED, "fresh", "gpu", "new").join()
    await a.die()
    reached(bus)
    assert sorted(await b.settle()) == ["cancelled", "returned"]
    assert {x.job for x in await fresh.take(5)} == {jobs[n].id for n in (1, 3, 4)}
    assert (await bus.recovery.reap(EMBED, ["gpu"]))[2] == []
    assert [await state(bus, jobs[n]) for n in (0, 2, 5)] == ["result", "cancelled", "cancelled"]
    await bus.close()


async def test_door_closes_before_the_limit(redis_server: Server, tmp_path: Path) -> None:
    """Above 85 % of maxmemory new work is refused, so that running work has the rest."""
    bus = await open_bus(redis_server.url, str(tmp_path))
    hand = await Hand(bus, EMBED, "a").join()
    redis_server.command("SET", "filler:0", b"x" * 10_000_000)
    with redis_server.client() as client:
        used = client.info("memory")["used_memory"]
    redis_server.config_set("maxmemory", int(used * 1.1))
    await hand.revive()  # its heartbeat tells how full Redis is
    assert (await admit(bus, new_job())).reason == "bus_full"
    redis_server.config_set("maxmemory", used * 3)
    await hand.revive()
    assert (await admit(bus, new_job())).outcome == "admitted"
    await bus.close()


async def test_connections_cut(redis_server: Server, tmp_path: Path) -> None:
    """Every connection cut again and again in mid-command: nothing is lost, doubled or charged."""
    async with mesh(redis_server.url, tmp_path) as m:
        await m.add("gpu-a")
        await m.add("gpu-b")

        # The workers' depths are 200 together.
        loading = asyncio.create_task(m.offer_until(300))
        for _ in range(30):
            await asyncio.sleep(0.05)
            await asyncio.to_thread(redis_server.command, "CLIENT", "KILL", "TYPE", "normal")
        async with asyncio.timeout(60):
            await loading
        # A cut is never an answer: all that may be said meanwhile is that the lane is full.
        assert {getattr(each, "reason", each) for each in m.refused} <= {"depth"}
        assert await m.outcomes() == ["result"] * 300
        assert len({job.id for job in m.accepted}) == 300
        for job in m.accepted:
            assert (await outcome(m.bus, job)).kind == "result"
        assert await differences(m.bus) == []


async def test_abandoned_waiters_break_nothing(redis_server: Server, tmp_path: Path) -> None:
    """Callers that leave in mid-command leave no reply behind for the next one."""
    bus = await open_bus(redis_server.url, str(tmp_path))

    async def ask(number: int) -> None:
        await bus.connection.call("SET", f"k{number}", number)
        assert await bus.connection.call("GET", f"k{number}") == b"%d" % number

    tasks = [asyncio.create_task(ask(n)) for n in range(500)]
    await asyncio.sleep(0.01)
    for task in tasks[::2]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [x for x in done if x is not None and not isinstance(x, asyncio.CancelledError)] == []
    for number in range(100):
        await ask(number)
    await bus.close()


async def test_away_from_the_start(tmp_path: Path) -> None:
    """No server at all: BusDown after the time given, with the reason; never a hang."""
    with pytest.raises(BusDown, match="the bus is away"):
        await Bus.open(Common(data_dir=str(tmp_path)), SystemClock(), timeout_s=0.2)
