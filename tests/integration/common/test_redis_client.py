"""The bus' and the pages' client meet the same errors in the same way, on every server and on a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis.crc import key_slot
from redis.exceptions import OutOfMemoryError, ResponseError

from common.bus.connection import BusDown, BusFull, Connection
from common.clock import SystemClock
from common.config import Common
from common.pages.server import PagesServer, TierDown
from tests.support.servers import KINDS, Cluster, Server

ROUNDS = 15 if os.environ.get("SPILLWAY_PROFILE") == "soak" else 4
KEY = "{a}:key"
SAY = "return redis.error_reply(ARGV[1])"
FILL = "return redis.call('SET', KEYS[1], ARGV[1])"
AWAY = (
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "UNBLOCKED force unblock from blocking operation, instance state changed",
    "NOREPLICAS Not enough good replicas to write.",
    "MISCONF Errors writing to the AOF file: No space left on device",
)


class Asked(NamedTuple):
    """One client under test: one try of a command, and the errors it promises."""

    call: Callable[..., Awaitable[Any]]
    close: Callable[[], Awaitable[None]]
    down: type[Exception]
    full: type[Exception]


@pytest.fixture(params=(*KINDS, "valkey-cluster"))
def place(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Any:
    """An empty server of each kind, and a cluster, that tests share."""
    kind, _, cluster = request.param.partition("-")
    name = f"cluster-{kind}" if cluster else kind
    if name not in _shared_servers:
        _shared_servers[name] = Cluster.build(kind) if cluster else Server(kind).start()
    _shared_servers[name].flush()
    return _shared_servers[name]


def opened(kind: str, place: Any, directory: Path) -> Asked:
    """The bus' client or the pages', on one server or cluster."""
    cluster, clock = isinstance(place, Cluster), SystemClock()
    if kind == "pages":
        server = PagesServer(place.url, clock, cluster=cluster)
        return Asked(server.call, server.close, TierDown, OutOfMemoryError)
    config = Common(data_dir=str(directory), redis_url=place.url, redis_cluster=cluster)
    connection = Connection(config, clock)

    async def once(*command: Any) -> Any:
        return await connection.call(*command, timeout_s=0.0)

    return Asked(once, connection.close, BusDown, BusFull)


@pytest.fixture(params=("bus", "pages"))
async def asked(request: pytest.FixtureRequest, place: Any, tmp_path: Path) -> AsyncIterator[Asked]:
    """Each client on each place, connected."""
    made = opened(request.param, place, tmp_path)
    assert await made.call("SET", KEY, "0") == b"OK"
    yield made
    await made.close()


async def answered(asked: Asked, *command: Any) -> Any:
    """The reply, asked for until the client counts the server as back."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await asked.call(*command)
            except asked.down:
                await asyncio.sleep(0.05)


@pytest.mark.sampled(3)
async def test_replies_that_mean_later(asked: Asked) -> None:
    """A server that takes no commands now counts as away, whichever words say so; then it is back."""
    for words in AWAY:
        with pytest.raises(asked.down):
            await asked.call("EVAL", SAY, 1, KEY, words)
        assert await answered(asked, "GET", KEY) == b"0"


async def test_replies_that_mean_never(asked: Asked) -> None:
    """What the server refuses for good is its own error, and the server counts as reached."""
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await asked.call("LPUSH", KEY, "x")
    with pytest.raises(ResponseError, match="so it is"):
        await asked.call("EVAL", SAY, 1, KEY, "ERR so it is")
    assert await asked.call("GET", KEY) == b"0"


@pytest.mark.parametrize("place", ["valkey-cluster"], indirect=True)
async def test_a_slot_that_never_settles(asked: Asked, place: Cluster) -> None:
    """A cluster that sends a command round in circles counts as away."""
    node = place.servers[0]
    moved = f"MOVED {key_slot(KEY.encode())} 127.0.0.1:{node.port}"
    with pytest.raises(asked.down):
        await asked.call("EVAL", SAY, 1, KEY, moved)
    assert await answered(asked, "GET", KEY) == b"0"


@pytest.mark.parametrize("place", ["valkey-cluster"], indirect=True)
async def test_commands_beside_one_that_closes_all_connections(asked: Asked) -> None:
    """redis-py closes the connections of all commands in flight when one is told that the cluster is down.

    The others get their own reply, or the error that means "away", and nothing else.
    """
    for _ in range(ROUNDS):
        names = [f"{{{n}}}:key" for n in range(40)]
        commands: list[tuple[Any, ...]] = [("SET", name, name) for name in names]
        commands[20:20] = [("EVAL", SAY, 1, KEY, AWAY[0])]
        found = await asyncio.gather(*map(once(asked), commands), return_exceptions=True)
        wrong = [f for f in found if f != b"OK" and not isinstance(f, asked.down)]
        assert wrong == []
        await answered(asked, "GET", KEY)


def once(asked: Asked) -> Callable[[tuple[Any, ...]], Coroutine[Any, Any, Any]]:
    """Run one command given as a tuple."""

    async def run(command: tuple[Any, ...]) -> Any:
        return await asked.call(*command)

    return run


async def test_callers_that_leave(asked: Asked) -> None:
    """Cancelled callers leave the connections in order: the others get their own replies."""
    names = [f"{{{n}}}:key" for n in range(16)]
    for name in names:
        await asked.call("SET", name, name * 500)
    for _ in range(10):
        reads = [asyncio.create_task(once(asked)(("GET", name))) for name in names]
        await asyncio.sleep(0)
        for read in reads[::2]:
            read.cancel()
        found = await asyncio.gather(*reads, return_exceptions=True)
        kept = [f for f in found if isinstance(f, bytes)]
        assert kept == [name.encode() * 500 for name in names[1::2]]
        assert all(isinstance(f, asyncio.CancelledError) for f in found[::2])


async def in_flight(asked: Asked) -> tuple[asyncio.Task[Any], set[asyncio.Task[Any]]]:
    """A caller that waits for a reply, and the tasks that it has started."""
    before = asyncio.all_tasks()
    caller = asyncio.create_task(once(asked)(("BLPOP", "{a}:list", 4)))
    async with asyncio.timeout(60):
        while True:
            if inner := asyncio.all_tasks() - before - {caller}:
                return caller, inner
            await asyncio.sleep(0)


async def test_a_command_cancelled_under_its_caller(asked: Asked) -> None:
    """A command that is cancelled while its caller is not ends in the error that means "away"."""
    caller, inner = await in_flight(asked)
    for task in inner:
        task.cancel()
    with pytest.raises(asked.down):
        await caller
    assert caller.cancelling() == 0
    assert await answered(asked, "GET", KEY) == b"0"


async def test_a_caller_cancelled_with_its_command(asked: Asked) -> None:
    """A caller that is cancelled stays cancelled, even where its command is cancelled, too."""
    caller, inner = await in_flight(asked)
    for task in (*inner, caller):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


@pytest.mark.sampled(3)
async def test_closed_under_a_caller(asked: Asked) -> None:
    """Who waits while the client is closed, or asks afterwards, is told so at once; nothing connects again."""
    waiting = asyncio.create_task(once(asked)(("BLPOP", "{a}:list", 0)))
    await asyncio.sleep(0.05)
    await asked.close()
    with pytest.raises(asked.down, match="closed"):
        await waiting
    with pytest.raises(asked.down, match="closed"):
        await asked.call("GET", KEY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", ["bus", "pages"])
async def test_a_full_server(kind: str, client: str, tmp_path: Path) -> None:
    """A full server is told apart from one that is away, in commands and in scripts, and reading goes on."""
    server = Server(kind).start()
    asked = opened(client, server, tmp_path)
    try:
        await asked.call("SET", KEY, "0")
        server.config_set("maxmemory", 1)
        for command in (("SET", KEY, "1"), ("EVAL", FILL, 1, KEY, "1")):
            with pytest.raises(asked.full):
                await asked.call(*command)
        assert await asked.call("GET", KEY) == b"0"
    finally:
        await asked.close()
        await asyncio.to_thread(server.close)
