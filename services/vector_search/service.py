"""Assemble vector_search: lock the files, open the bus, load the shards, serve, drain."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from common import log
from common.bus import Bus
from common.bus.startup import open_bus
from common.clock import SystemClock
from common.config import SearchConfig
from common.devices import detect
from common.errors import ConfigError
from common.health import Health
from common.supervisor import Supervisor
from services.vector_search.replica import Replica
from services.vector_search.replica_directory import ReplicaDirectory

SERVICE = "vector_search"
# A search takes the interpreter several times; it must not wait 5 ms each time behind a write.
_SWITCH_S = 0.0005
_WATCH_S = 0.5
_DOWN_S = 3.0
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
            watch = supervisor.process(_watch(bus, replica, health, stopping), "watch")
            try:
                await replica.run(stopping)
            finally:
                await supervisor.end(watch)
        finally:
            await bus.close()
    finally:
        await runner.cleanup()
        directory.unlock()


async def _watch(bus: Bus, replica: Replica, health: Health, stopping: asyncio.Event) -> None:
    """Keep readiness true to the bus and the shards, and unready from the moment of the stop."""
    while not stopping.is_set():
        down_s = bus.connection.down_s()
        health.set("bus", down_s < _DOWN_S, f"Redis has been away for {down_s:.0f} s")
        if replica.ready.is_set():
            health.set("shards", ready=True)
        try:
            async with asyncio.timeout(_WATCH_S if replica.ready.is_set() else 0.05):
                await stopping.wait()
        except TimeoutError:
            continue
    health.draining()
