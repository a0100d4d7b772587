"""The router as a process: starts its parts in order, serves until it is stopped, drains, and stops its parts."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

from common import log
from common.bus.startup import announce, open_bus
from common.clock import SystemClock
from common.config import RouterConfig
from common.errors import ConfigError
from common.health import Health
from common.heap import keep_freed
from common.tasks import Supervisor
from services.router.assembly import CLOSE_S, RouterProcess, assemble

_KEPT_MEBIBYTES = 64  # a response of hits with their texts is some megabytes
_log = log.get("router")


def tls_context(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the TLS context of tls_cert and tls_key, None without them; ConfigError if they cannot be used."""
    if not config.tls_cert and not config.tls_key:
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError("SPILLWAY_TLS_CERT and SPILLWAY_TLS_KEY: expected both or neither")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for path in (config.tls_cert, config.tls_key):
            if Path(path).exists() and not Path(path).is_file():  # a pipe or a device may never end
                raise OSError(f"{path} is no regular file")
        # Without a callback OpenSSL would ask for a locked key's password on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"SPILLWAY_TLS_CERT is {config.tls_cert!r}, SPILLWAY_TLS_KEY is {config.tls_key!r}: {error}; "
            "expected a certificate and its key in PEM"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is locked with a password")


async def _warn_without_keys(router: RouterProcess, config: RouterConfig) -> None:
    if router.keys_on and not await router.keys.any():
        _log.warning(
            "no_api_key", why=_why_keys(config), create="spillway keys create --tenant NAME"
        )


def _why_keys(config: RouterConfig) -> str:
    """Return the reason why requests need keys, for the log of a router for which no key exists."""
    if config.keys == "on":
        return "SPILLWAY_KEYS is on, so every request needs a key, and there is none yet"
    return f"{config.host} can be reached from other machines, so every request needs a key, and there is none yet"


async def _drain(router: RouterProcess, health: Health, drain_s: float) -> None:
    """Refuse new requests, finish those that run within `drain_s`, and hand over the rest."""
    health.draining()
    router.admission.draining = True
    _log.info("drain_began", active=router.active.count)
    loop = asyncio.get_running_loop()
    until = loop.time() + drain_s
    await router.workflows.server.drain(max(until - loop.time() - CLOSE_S, 0.0))
    for end in (router.streams.end_all, None):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(until - loop.time() - CLOSE_S, 0.1 if end else 1.0)):
                await router.active.quiet()
                break
        if end is not None:
            end()
    _log.info("drain_ended", active=router.active.count)


async def serve(config: RouterConfig, instance: str, stopping: asyncio.Event) -> None:
    """Run the router until `stopping` is set, then drain; TaskEnded if a background task ended by itself."""
    keep_freed(_KEPT_MEBIBYTES)
    async with Supervisor(stopping) as supervisor:
        await _serve(config, instance, stopping, supervisor)


async def _serve(
    config: RouterConfig, instance: str, stopping: asyncio.Event, supervisor: Supervisor
) -> None:
    tls = tls_context(config)
    health = Health(
        "router",
        instance=instance,
        data_dir=config.data_dir,
        waits_for=("bus", "workers"),
        supervisor=supervisor,
    )
    async with AsyncExitStack() as stack:
        bus = await open_bus(config, SystemClock(), health, stopping)
        if bus is None:
            return
        stack.push_async_callback(bus.close)
        router = await assemble(config, bus, health, stack)
        await router.workflows.start()
        stack.push_async_callback(supervisor.end, *router.history.start())
        port = await _listen(router, config, health, tls, stack)
        stack.push_async_callback(
            supervisor.end, announce(config, "router", instance, bus, stopping)
        )
        stack.push_async_callback(supervisor.end, router.monitor.start())
        await _warn_without_keys(router, config)
        _log.info(
            "router_started", host=config.host, port=port, tls=tls is not None, keys=router.keys_on
        )
        await stopping.wait()
        await _drain(router, health, config.drain_s)


async def _listen(
    router: RouterProcess,
    config: RouterConfig,
    health: Health,
    tls: ssl.SSLContext | None,
    stack: AsyncExitStack,
) -> int:
    """Listen for clients and for health checks; return the clients' port. ConfigError if an address is taken."""
    try:
        port = await router.server.start(config.host, config.port, tls)
        runner = await health.serve(config.health_host, config.health_port, public_port=port)
    except OSError as error:
        raise ConfigError(
            f"SPILLWAY_HOST is {config.host!r}, SPILLWAY_PORT is {config.port}: {error.strerror or error}; "
            "expected an address that is free"
        ) from error
    stack.push_async_callback(runner.cleanup)
    stack.push_async_callback(router.server.stop)
    return port
