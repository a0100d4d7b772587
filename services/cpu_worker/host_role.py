"""The host role: attends for the gpu_worker of this machine to pages in host memory; knows no bus and no model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common import log
from common.config import WorkerConfig
from common.errors import ConfigError
from common.health import Health
from common.tasks import Supervisor, wait
from engine.host.channel import ChannelLibrary, load_channel
from engine.host.helper import HostHelper

_PAUSE_S = 1.0
_log = log.get("work")


async def help_host(
    config: WorkerConfig, service: str, instance: str, stopping: asyncio.Event
) -> None:
    """Attach to the gpu_worker at the socket of the config, again whenever it comes back, until the stop.

    It attends with `config.threads` threads. ConfigError if there is no socket, no native library, or the worker
    refuses this build.
    """
    if not config.host_socket:
        raise ConfigError(
            "SPILLWAY_ROLE is 'host' and SPILLWAY_HOST_SOCKET is empty; expected the socket of a gpu_worker"
        )
    library = await asyncio.to_thread(load_channel)
    if library is None:
        raise ConfigError(
            "SPILLWAY_ROLE is 'host': needs Linux and the compiled kernels; expected a C++ compiler here"
        )
    async with Supervisor(stopping) as supervisor:
        health = Health(
            service, instance=instance, data_dir=config.data_dir, waits_for=("gpu_worker",),
            supervisor=supervisor,
        )  # fmt: skip
        runner = await health.serve(config.health_host, config.health_port)
        try:
            while not stopping.is_set():
                await _help(config, library, health, stopping)
                await wait(stopping, _PAUSE_S)
        finally:
            await runner.cleanup()


async def _help(
    config: WorkerConfig, library: ChannelLibrary, health: Health, stopping: asyncio.Event
) -> None:
    """Attend for one life of the gpu_worker, if it is there."""
    socket = str(Path(config.data_dir) / config.host_socket)
    try:
        helper = await asyncio.to_thread(HostHelper, socket, library)
    except OSError as error:
        health.set("gpu_worker", ready=False, why=f"none at {socket}: {error}")
        return
    _log.info("attached", socket=socket, threads=config.threads)
    health.set("gpu_worker", ready=True)
    serving = asyncio.create_task(asyncio.to_thread(helper.serve, config.threads, config.slowdown))
    gone = asyncio.Event()

    def read() -> None:
        if helper.gone():
            gone.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(helper.connection, read)
    waits = [asyncio.create_task(event.wait()) for event in (gone, stopping)]
    try:
        await asyncio.wait({serving, *waits}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(helper.connection)
        helper.stop()
        for each in waits:
            each.cancel()
        done = await serving
        helper.close()
    health.set("gpu_worker", ready=False, why="the gpu_worker has gone")
    _log.info("detached", layers=done)
