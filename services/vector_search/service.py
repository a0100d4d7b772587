"""The service vector_search: locks its files, opens the bus, loads the shards, serves, and drains."""

from __future__ import annotations

import asyncio
import resource
import sys
from functools import partial
from pathlib import Path

from common.bus import Bus
from common.bus.startup import serve_on_bus, watch_bus
from common.config import SearchConfig
from common.devices import detect
from common.health import Health
from common.heap import keep_freed
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory

SERVICE = "vector_search"
# The interval at which threads take turns: a search waits for the interpreter several times, by default 5 ms each.
_SWITCH_S = 0.0005
_KEPT_MEBIBYTES = 64  # results of hits with texts take some megabytes


async def serve(config: SearchConfig, instance: str, stopping: asyncio.Event) -> None:
    """Run one replica until `stopping`; ConfigError if it cannot start, TaskEnded if a task ended by itself."""
    sys.setswitchinterval(_SWITCH_S)
    keep_freed(_KEPT_MEBIBYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # several files a collection
    directory = ReplicaDirectory(Path(config.data_dir) / "search" / (config.replica or instance))
    directory.lock()
    try:
        work = partial(_work, config, directory, stopping)
        await serve_on_bus(config, SERVICE, instance, stopping, work, waits_for=("bus", "shards"))
    finally:
        directory.unlock()


async def _work(
    config: SearchConfig,
    directory: ReplicaDirectory,
    stopping: asyncio.Event,
    bus: Bus,
    health: Health,
) -> None:
    name = config.replica or directory.name()
    machine = detect()
    memory = machine.memory_limit_bytes or machine.memory_bytes
    replica = Replica(
        directory, bus, config, name=name, cores=machine.usable_cores, memory_bytes=memory
    )
    watch = bus.supervisor.process(watch_bus(bus, health, stopping), "watch")
    ready = bus.supervisor.scoped(partial(_note_ready, replica, health), "ready")
    try:
        await replica.run(stopping)
    finally:
        await bus.supervisor.end(watch, ready)


async def _note_ready(replica: Replica, health: Health) -> None:
    """Set the health's condition `shards` once the shards are ready."""
    await replica.ready.wait()
    health.set("shards", ready=True)
