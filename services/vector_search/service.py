"""Assemble vector_search: lock the files, open the bus, load the shards, serve, drain."""

from __future__ import annotations

import asyncio
import resource
import sys
from functools import partial
from pathlib import Path

from common import log
from common.bus.startup import open_bus, watch_bus
from common.clock import SystemClock
from common.config import SearchConfig
from common.devices import detect
from common.health import Health
from common.tasks import Supervisor
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory

SERVICE = "vector_search"
# A search takes the interpreter several times; it must not wait 5 ms each time behind a write.
_SWITCH_S = 0.0005
_log = log.get(SERVICE)


async def serve(config: SearchConfig, instance: str, stopping: asyncio.Event) -> None:
    """Run one replica until `stopping`; ConfigError if it cannot start, TaskEnded if a task ended by itself."""
    sys.setswitchinterval(_SWITCH_S)
    async with Supervisor(stopping) as supervisor:
        await _serve(config, instance, stopping, supervisor)


async def _serve(
    config: SearchConfig, instance: str, stopping: asyncio.Event, supervisor: Supervisor
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # several files a collection
    directory = ReplicaDirectory(Path(config.data_dir) / "search" / (config.replica or instance))
    directory.lock()
    health = Health(
        SERVICE,
        instance=instance,
        data_dir=config.data_dir,
        waits_for=("bus", "shards"),
        supervisor=supervisor,
    )
    runner = await health.serve(config.health_host, config.health_port)
    try:
        bus = await open_bus(config, SystemClock(), health, stopping)
        if bus is None:
            return
        try:
            name = config.replica or directory.name()
            replica = Replica(directory, bus, config, name=name, cores=detect().usable_cores)
            watch = supervisor.process(watch_bus(bus, health, stopping), "watch")
            ready = supervisor.scoped(partial(_note_ready, replica, health), "ready")
            try:
                await replica.run(stopping)
            finally:
                await supervisor.end(watch, ready)
        finally:
            await bus.close()
    finally:
        await runner.cleanup()
        directory.unlock()


async def _note_ready(replica: Replica, health: Health) -> None:
    """Say that the shards are ready once they are."""
    await replica.ready.wait()
    health.set("shards", ready=True)
