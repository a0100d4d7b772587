"""A lock in Redis: one owner at a time, renewed and deleted by its owner only, given by a full server, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.redis.lock import RedisLock
from tests.support.clock import ManualClock
from tests.support.servers import KINDS, Server

KEY = "{a}:lock"
LIFE_MS = 600_000


def locks(server: Server, count: int) -> tuple[list[RedisLock], ManualClock]:
    """Locks of as many owners on one key, and the clock by which they count."""
    clock = ManualClock()

    async def call(*command: Any) -> Any:
        return await asyncio.to_thread(server.command, *command)

    return [RedisLock(call, KEY, f"owner-{n}", LIFE_MS, clock) for n in range(count)], clock


@pytest.mark.parametrize("shared_redis", KINDS, indirect=True)
async def test_one_owner(shared_redis: Server) -> None:
    """Of many one gets the lock and renews it; when it is released, or has lapsed, another gets it."""
    (first, second, *others), _ = locks(shared_redis, 8)
    assert await first.acquire() == "taken"
    assert await first.acquire() == "renewed"
    assert [await other.acquire() for other in (second, *others)] == ["other"] * 7
    assert 0 < shared_redis.command("PTTL", KEY) <= LIFE_MS
    assert await first.release()
    found = await asyncio.gather(*(lock.acquire() for lock in (second, *others)))
    assert sorted(found) == ["other"] * 6 + ["taken"]
    shared_redis.command("DEL", KEY)  # as when it lapses
    assert await first.acquire() == "taken"


@pytest.mark.parametrize("shared_redis", KINDS, indirect=True)
async def test_only_the_owner_deletes(shared_redis: Server) -> None:
    """Who has lost the lock, and who never had it, leaves it to its owner."""
    (first, second, third), _ = locks(shared_redis, 3)
    await first.acquire()
    shared_redis.command("DEL", KEY)
    await second.acquire()
    assert [await first.release(), await third.release()] == [False, False]
    assert await second.acquire() == "renewed"
    assert await second.release()
    assert shared_redis.command("EXISTS", KEY) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_server_has_one_owner(kind: str) -> None:
    """A server that refuses to store anything gives the lock to one, renews it and takes it back."""
    server = Server(kind).start()
    try:
        (first, second), _ = locks(server, 2)
        server.config_set("maxmemory", 1)
        found = await asyncio.gather(first.acquire(), second.acquire())
        assert sorted(found) == ["other", "taken"]
        owner, other = (first, second) if found[0] == "taken" else (second, first)
        assert await owner.acquire() == "renewed"
        assert not await other.release()
        assert await owner.release()
        assert await other.acquire() == "taken"
    finally:
        await asyncio.to_thread(server.close)


async def test_held_ends_before_the_server_lets_it_go(shared_redis: Server) -> None:
    """An owner that hears nothing knows by its own clock when another may have the lock."""
    (first, second), clock = locks(shared_redis, 2)
    assert not first.held
    await first.acquire()
    clock.now_s = LIFE_MS / 1000 - 0.001
    assert first.held
    clock.now_s = LIFE_MS / 1000
    assert not first.held
    await first.acquire()
    assert first.held
    await second.acquire()
    assert not second.held
    await first.release()
    assert not first.held
