"""The processes of a mesh: what they say of themselves on the bus, and for how long it holds."""

from __future__ import annotations

import asyncio
import os

from msgspec.structs import replace

from common.bus import Bus, keys
from common.config import RouterConfig, WorkerConfig
from common.registry.processes import KEPT_S, LIVE_S, Processes, describe
from common.wire.message import encode
from tests.support.waiting import until


async def test_a_process_is_listed_while_it_runs(bus: Bus) -> None:
    """It is there with its threads and settings once it runs, and gone as soon as it is to stop."""
    processes, stopping = Processes(bus), asyncio.Event()
    record = describe(WorkerConfig(threads=3, max_running=8), "gpu_worker", "1", bus.clock.now_ms())
    task = asyncio.create_task(processes.announce(record, stopping))

    async def listed() -> bool:
        return bool(await processes.living())

    await until(listed)
    (found,) = await processes.living()
    assert (found.service, found.instance, found.pid) == ("gpu_worker", "1", os.getpid())
    assert found.threads == 3
    assert found.settings == {"SPILLWAY_THREADS": "3", "SPILLWAY_MAX_RUNNING": "8"}
    assert found.cores == len(os.sched_getaffinity(0))
    stopping.set()
    await task
    assert await processes.living() == []


async def test_what_died_is_not_counted_and_forgotten_later(bus: Bus) -> None:
    """A process that has not spoken for some seconds is not listed; a router removes what is minutes old."""
    processes, stopping, now = Processes(bus), asyncio.Event(), bus.clock.now_ms()
    record = describe(RouterConfig(), "router", "0", now)
    for name, silent_s in (("living", 0.0), ("dead", LIVE_S + 1), ("old", KEPT_S + 1)):
        each = replace(record, instance=name, seen_ms=int(now - 1000 * silent_s))
        await bus.connection.call("HSET", keys.PROCESSES, name, encode(each))

    assert [each.instance for each in await processes.living()] == ["living"]
    task = asyncio.create_task(processes.announce(record, stopping))

    async def removed() -> bool:
        return not await bus.connection.call("HEXISTS", keys.PROCESSES, "old")

    await until(removed)
    assert await bus.connection.call("HEXISTS", keys.PROCESSES, "dead")
    stopping.set()
    await task
