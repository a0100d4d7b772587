"""Pages at full speed stay off the bus: a writer, a reader and a kv_store that evicts, and what the two servers saw."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from tests.conftest import PROFILE
from tests.router.mesh import Process
from tests.servers import Server

SECONDS = 20.0 if PROFILE == "soak" else 2.0
BUDGET = 16 << 20
WRITER = """
import asyncio, json, os, sys, time
from common.clock import SystemClock
from common.config import PagesConfig
from common.pages.codec import Header, encode
from common.pages.keys import PageKey
from common.pages.store import PageStore

async def main():
    url, budget, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    store = PageStore.of(PagesConfig(pages_url=url, pages_bytes=budget), SystemClock())
    layers, end = [os.urandom(32_000)] * 2, time.monotonic() + seconds
    told = dict.fromkeys(("stored", "full", "put", "got"), 0)
    keys = []

    async def write():
        while time.monotonic() < end:
            key = PageKey(os.urandom(16))
            head = Header(id=key.id, parent=bytes(16), depth=0, layers=2, layer_bytes=32_000)
            outcome = await store.put(key, value := encode(head, layers), 60)
            told[outcome] += 1
            if outcome == "stored":
                told["put"] += len(value)
                keys.append(key)
            else:
                await asyncio.sleep(0.01)  # until the keeper has made room

    async def read():
        while time.monotonic() < end:
            for value in await store.get_many(keys[-8:]):
                told["got"] += len(value or b"")
            await asyncio.sleep(0)

    await asyncio.gather(write(), write(), read())
    await store.close()
    print(json.dumps(told))

asyncio.run(main())
"""


def told(server: Server, section: str) -> dict[str, str]:
    """What a server says of itself."""
    reply: dict[str, Any] = server.client().info(section)
    return {name: str(value) for name, value in reply.items()}


async def test_pages_never_touch_the_bus(tmp_path: Path, monkeypatch: Any) -> None:
    """While tens of megabytes of pages move and are evicted, the bus gets none of them, and answers its commands."""
    bus_server, pages_server = Server("valkey").start(), Server("valkey", appendonly="no").start()
    monkeypatch.setenv("SPILLWAY_PAGES_URL", pages_server.url)
    flags = ("--pages-bytes", str(BUDGET), "--disk-bytes", "0")
    keeper = Process("kv_store", tmp_path, bus_server.url, "0", *flags).start()
    config = Common(data_dir=str(tmp_path), redis_url=bus_server.url)
    bus = await Bus.open(config, SystemClock())
    try:
        keeper.ports()
        before = {s: told(s, "stats") for s in (bus_server, pages_server)}
        writer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WRITER, pages_server.url, str(BUDGET), str(SECONDS)),
            stdout=asyncio.subprocess.PIPE,
        )
        ended = asyncio.create_task(writer.communicate())
        answered = 0
        while not ended.done():
            await bus.call("HSET", "{test/0}:answered", "count", answered)
            assert await bus.call("HGET", "{test/0}:answered", "count") == b"%d" % answered
            answered += 1
            await asyncio.sleep(0.001)
        (out, _) = await ended
        moved = json.loads(out)
        after = {s: told(s, "stats") for s in (bus_server, pages_server)}

        def more(server: Server, name: str) -> int:
            return int(after[server][name]) - int(before[server][name])

        assert moved["put"] > BUDGET  # so much that pages had to go
        assert moved["got"] > 0
        assert more(pages_server, "total_net_input_bytes") >= moved["put"]
        assert more(pages_server, "total_net_output_bytes") >= moved["got"]
        assert answered > 100
        for way in ("total_net_input_bytes", "total_net_output_bytes"):
            # About 100 bytes of each of our own commands, and what a kv_store says and hears of itself.
            assert more(bus_server, way) < 1000 * answered + 200_000 * SECONDS < moved["put"]
        assert bus_server.client().keys("*pages/*") == []
        assert pages_server.client().keys("*lane*") == []
    finally:
        await bus.close()
        keeper.kill()
        for server in (bus_server, pages_server):
            await asyncio.to_thread(server.close)
