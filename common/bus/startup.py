"""The life of a service on its bus: a bus opens once Redis answers and processes of another version have ended.

The wait has no limit, but a stop of the process ends it. The condition `bus` of the service's health gives the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from redis.exceptions import RedisError

from common import log
from common.bus import Bus, BusDown
from common.bus.connection import MixedScripts
from common.clock import SystemClock
from common.config import Common
from common.errors import ConfigError
from common.health import Health
from common.redis import durability
from common.registry.processes import Processes, describe
from common.tasks import Supervisor, wait

_TRY_S = 5.0
_PAUSE_S = 1.0
_WATCH_S = 0.5
_DOWN_S = 3.0  # a shorter outage leaves a service ready
_log = log.get("bus")


async def open_bus(
    config: Common, clock: SystemClock, health: Health, stopping: asyncio.Event
) -> Bus | None:
    """Connect to the bus, without a time limit; None if the process is stopped meanwhile.

    The health's condition `bus` gives the reason for the wait. ConfigError if the address is not valid, or the server
    does not keep the durability that the config names.
    """
    while not stopping.is_set():
        bus = None
        try:
            bus = await Bus.open(config, clock, timeout_s=_TRY_S, supervisor=health.supervisor)
            for call in bus.connection.callers():
                await durability.check(call, config.durability)
            await bus.connection.claim_scripts()
            await bus.writes.agree_on_partitions()
        except (BusDown, MixedScripts, RedisError, OSError) as error:
            health.set("bus", ready=False, why=str(error))
            _log.warning("bus_awaited", error=str(error))
        except ConfigError:
            if bus is not None:
                await bus.close()
            raise
        else:
            return bus
        if bus is not None:
            await bus.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _PAUSE_S)
    return None


async def serve_on_bus(
    config: Common,
    service: str,
    instance: str,
    stopping: asyncio.Event,
    work: Callable[[Bus, Health], Awaitable[None]],
    *,
    waits_for: Iterable[str],
    load: Callable[[Health], Awaitable[None]] | None = None,
) -> None:
    """Run the work of a service on an open bus, beside its health endpoints; `load` runs before the bus opens.

    ConfigError if the service cannot start; TaskEnded if a background task ended by itself.
    """
    async with Supervisor(stopping) as supervisor:
        health = Health(
            service,
            instance=instance,
            data_dir=config.data_dir,
            waits_for=waits_for,
            supervisor=supervisor,
        )
        runner = await health.serve(config.health_host, config.health_port)
        try:
            if load is not None:
                await load(health)
            bus = await open_bus(config, SystemClock(), health, stopping)
            if bus is not None:
                announcing = announce(config, service, instance, bus, stopping)
                try:
                    await work(bus, health)
                finally:
                    await supervisor.end(announcing)
                    await bus.close()
        finally:
            await runner.cleanup()


def announce(
    config: Common, service: str, instance: str, bus: Bus, stopping: asyncio.Event
) -> asyncio.Task[None]:
    """Begin to publish this process' record, with its settings, until the stop."""
    record = describe(config, service, instance, bus.clock.now_ms())
    work = Processes(bus).announce(record, stopping)
    return bus.supervisor.process(work, "announce")


async def watch_bus(bus: Bus, health: Health, stopping: asyncio.Event) -> None:
    """Keep the health's condition `bus` up to date until the stop; then make the service unready."""
    while not stopping.is_set():
        down_s = bus.connection.policy.down_s()
        health.set("bus", down_s < _DOWN_S, f"Redis has been away for {down_s:.0f} s")
        await wait(stopping, _WATCH_S)
    health.draining()
