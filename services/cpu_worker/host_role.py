"""The host role: attends for a gpu_worker, here or on another machine, to pages in host memory; no bus, no model."""

from __future__ import annotations

import asyncio

from common import log
from common.config import WorkerConfig
from common.errors import ConfigError
from common.health import Health
from common.tasks import Supervisor, wait
from common.types.helper_address import HelperAddress
from engine.host.channel import ChannelLibrary, load_channel
from engine.host.helper import HostHelper
from engine.host.tcp_helper import TcpHelper

_PAUSE_S = 1.0
_log = log.get("work")


async def help_host(
    config: WorkerConfig, service: str, instance: str, stopping: asyncio.Event
) -> None:
    """Attach to the gpu_worker at the socket of the config, again whenever it comes back, until the stop.

    It attends with `config.threads` threads. ConfigError if there is no socket, no native library, or the worker
    refuses this build or, over TCP, does not know the secret.
    """
    address = HelperAddress.of(config.data_dir, config.host_socket, config.host_secret)
    if address is None:
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
                await _help(config, address, library, health, stopping)
                await wait(stopping, _PAUSE_S)
        finally:
            await runner.cleanup()


async def _help(
    config: WorkerConfig,
    address: HelperAddress,
    library: ChannelLibrary,
    health: Health,
    stopping: asyncio.Event,
) -> None:
    """Attend for one life of the gpu_worker, if it is there."""
    try:
        helper = await asyncio.to_thread(_attach, address, library)
    except OSError as error:
        health.set("gpu_worker", ready=False, why=f"none at {address}: {error}")
        return
    _log.info("attached", socket=str(address), threads=config.threads)
    health.set("gpu_worker", ready=True)
    serving = asyncio.create_task(asyncio.to_thread(helper.serve, config.threads, config.slowdown))
    asked = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        helper.stop()
        done = await serving
        helper.close()
    health.set("gpu_worker", ready=False, why="the gpu_worker has gone")
    _log.info("detached", layers=done)


def _attach(address: HelperAddress, library: ChannelLibrary) -> HostHelper | TcpHelper:
    if address.kind == "unix":
        return HostHelper(address.path, library)
    return TcpHelper(address, library)
