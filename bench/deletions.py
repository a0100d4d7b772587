"""Measure the deletion of a session beside few and beside many other sessions, by the indexes and by a walk.

`python -m bench.deletions redis://127.0.0.1:6379` prints the table of docs/benchmarks/D1.md. The server must be
empty; it is left as it is found. A walk is what sessions from before the indexes take.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

import redis

from common.bus import Bus, keys
from common.clock import SystemClock
from common.config import Common
from common.ids import Family, job_id, ulid
from common.registry.sessions import SessionEnds, Sessions
from common.wire.sessions import SessionRecord
from services.kv_store.deletion.session_eraser import SessionEraser

FAMILY, TENANT = Family("chat.deletions"), "bench"
STORES, TURNS, ROUNDS = (100, 20_000), 20, 3
_EVENT = b"e" * 1000
_AT_ONCE = 500


def crowd(raw: redis.Redis, count: int) -> None:
    """Store what `count` sessions of one turn leave; each hundredth turn is a dead letter."""
    now_ms = int(time.time() * 1000)
    for first in range(0, count, _AT_ONCE):
        pipe = raw.pipeline(transaction=False)
        for at in range(min(_AT_ONCE, count - first)):
            _leave(pipe, job_id(FAMILY, ulid()), job_id(FAMILY, ulid()), now_ms, dead=at % 100 == 0)
        pipe.execute()


def _leave(pipe: redis.client.Pipeline, session: str, job: str, now_ms: int, dead: bool) -> None:
    pipe.hset(keys.session(session), mapping={"tenant": TENANT, "ttl": 3600})
    pipe.zadd(keys.sessions(FAMILY, TENANT), {session: now_ms})
    pipe.hset(keys.jobs(session), job, "")
    pipe.hset(keys.job(job), mapping={"state": "result", "router": "r"})
    pipe.rpush(keys.log(job), _EVENT)
    pipe.set(keys.claimed(job), keys.claim(TENANT, job))
    pipe.set(keys.claim(TENANT, job), b"0123456789abcdef" + job.encode())
    if dead:
        pipe.xadd(keys.dead(FAMILY), {"job": job, "payload": _EVENT})


async def session_of(bus: Bus, raw: redis.Redis) -> str:
    """Store a session of `TURNS` turns; return its id."""
    name, now_ms = job_id(FAMILY, ulid()), bus.clock.now_ms()
    record = SessionRecord(
        id=name,
        tenant=TENANT,
        model="m",
        fingerprint="f",
        version=0,
        tokens=0,
        turns=0,
        ttl_s=3600,
        created_ms=now_ms,
        updated_ms=now_ms,
    )
    await Sessions(bus).create(record)
    pipe = raw.pipeline(transaction=False)
    for _ in range(TURNS):
        job = job_id(FAMILY, ulid())
        _leave(pipe, name, job, now_ms, dead=False)
    pipe.hset(keys.session(name), mapping={"tenant": TENANT, "ttl": 3600})
    pipe.execute()
    return name


async def seconds(bus: Bus, raw: redis.Redis) -> float:
    """Return the median time of a deletion with its proof."""
    took = []
    for _ in range(ROUNDS):
        name = await session_of(bus, raw)
        began = time.perf_counter()
        await SessionEraser(bus).erase([(name, TENANT)], bus.clock.now_ms() + 60_000, prove=True)
        took.append(time.perf_counter() - began)
        await SessionEnds(bus).forget(name, TENANT)
    return statistics.median(took)


async def measure(url: str) -> list[tuple[int, float, float]]:
    """Return, by the other sessions of a store, the seconds of a deletion by the indexes and by a walk."""
    raw = redis.Redis.from_url(url)
    if raw.dbsize():
        raise SystemExit(f"{url} is not empty: expected a server of its own")
    bus = await Bus.open(Common(redis_url=url), SystemClock())
    rows, there = [], 0
    try:
        await seconds(bus, raw)  # connections are made, scripts loaded
        for count in STORES:
            crowd(raw, count - there)
            there = count
            raw.hset(keys.INDEX, mapping={"since": 0, "letters": 0})
            indexed = await seconds(bus, raw)
            raw.delete(keys.INDEX)
            rows.append((count, indexed, await seconds(bus, raw)))
    finally:
        await bus.close()
        raw.flushdb()
    return rows


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    print("| other sessions | by the indexes (ms) | by a walk (ms) |\n| --- | --- | --- |")
    for count, indexed, walked in asyncio.run(measure(arguments[0])):
        print(f"| {count:,} | {1000 * indexed:.0f} | {1000 * walked:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
