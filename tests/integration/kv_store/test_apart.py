"""Pages at full speed stay off the bus: a writer, a reader and a kv_store that evicts, and what the two servers saw."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import redis

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.workloads.page_traffic import PageTraffic
from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from tests.conftest import PROFILE

SECONDS = 20.0 if PROFILE == "soak" else 2.0
BUDGET = 16 << 20


def told(server: redis.Redis) -> dict[str, int]:
    """Bytes that a server says came in and went out."""
    found = server.info("stats")
    return {way: int(found[f"total_net_{way}_bytes"]) for way in ("input", "output")}


async def test_pages_never_touch_the_bus(tmp_path: Path) -> None:
    """While tens of megabytes of pages move and are evicted, the bus gets none of them, and answers its commands."""
    env = {"SPILLWAY_PAGES_BYTES": str(BUDGET), "SPILLWAY_DISK_BYTES": "0"}
    async with LocalMesh(tmp_path, [processes.kv_store()], env=env) as mesh:
        servers = [redis.Redis.from_url(url) for url in (mesh.redis_url, mesh.pages_url)]
        before = [told(server) for server in servers]
        bus = await Bus.open(
            Common(data_dir=str(tmp_path), redis_url=mesh.redis_url), SystemClock()
        )
        answered = 0
        async with PageTraffic(mesh.pages_url, BUDGET) as traffic:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end or told(servers[1])["input"] < 4 * BUDGET:
                await bus.connection.call("HSET", "{test/0}:answered", "count", answered)
                assert (
                    await bus.connection.call("HGET", "{test/0}:answered", "count")
                    == b"%d" % answered
                )
                answered += 1
                await asyncio.sleep(0.001)
        await bus.close()
        after = [told(server) for server in servers]
        on_bus, on_pages = (
            {way: now[way] - then[way] for way in now}
            for then, now in zip(before, after, strict=True)
        )
        moved = traffic.moved

        assert moved.put > BUDGET  # so much that pages had to go
        assert moved.got > 0
        assert on_pages["input"] >= moved.put
        assert on_pages["output"] >= moved.got
        assert answered > 100
        for way in on_bus:
            # About 100 bytes of each of our own commands, and what a kv_store says and hears of itself.
            assert on_bus[way] < 1000 * answered + 200_000 * SECONDS < moved.put
        bus_server, pages_server = servers
        assert bus_server.keys("*pages/*") == []
        assert pages_server.keys("*lane*") == []
        for server in servers:
            server.close()
