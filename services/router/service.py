"""The router as a process: builds its parts in order, serves until told to stop, drains, and takes them down."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

from common import log
from common.bus import Bus, Notifications
from common.bus.startup import open_bus
from common.clock import SystemClock
from common.config import RouterConfig
from common.errors import ConfigError
from common.health import Health
from common.pages.store import PageStore
from common.registry.api_keys import KeyStore
from common.supervisor import Supervisor
from common.worker.incarnation import incarnation_name
from services.router.admission.controller import AdmissionController
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import DeliveryLatency, LanePolicy
from services.router.admission.queue import AdmissionQueue
from services.router.admission.request_runner import RequestRunner
from services.router.admission.request_store import RequestStore
from services.router.cards import Cards
from services.router.http.app import Server
from services.router.http.context import Router
from services.router.text.pool import TextPool
from services.router.watch import Watch
from services.router.workflows.context import WorkflowContext
from services.router.workflows.runner import WorkflowRunner

CLOSE_S = 2.0
_log = log.get("router")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keys_needed(config: RouterConfig) -> bool:
    """Return whether requests need a key: always, never, or unless the router is on loopback."""
    return config.keys == "on" or (config.keys == "auto" and not is_loopback(config.host))


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


async def _assemble(
    config: RouterConfig, bus: Bus, clock: SystemClock, health: Health, stack: AsyncExitStack
) -> Router:
    name = incarnation_name("router")
    hops = DeliveryLatency()
    policy = LanePolicy(config.admission, hops)
    journal = Notifications(bus.connection, name, hops.heard, bus.supervisor)
    await journal.start()
    stack.push_async_callback(journal.stop)
    stack.push_async_callback(bus.supervisor.settle, CLOSE_S)
    cards = Cards(bus, config.data_dir, embed=config.default_model, rerank=config.rerank_model)
    pool = TextPool(config.text_processes)
    await pool.start()
    stack.callback(pool.stop)
    keys, requests, orphans = KeyStore(bus), RequestStore(bus), OrphanReaper(bus, name)
    queue = AdmissionQueue(journal)
    admission = AdmissionController(bus, journal, keys, policy, queue, requests, orphans)
    runner = RequestRunner(bus, journal, keys, admission, requests, orphans)
    tools = WorkflowContext(admission, bus, journal, cards, pool, config.search_ack)
    pipeline = WorkflowRunner(tools, config.partitions)
    runner.on_flagged = pipeline.step_now
    pages = PageStore.of(config, clock)
    if pages is not None:
        stack.push_async_callback(pages.close)
    return Router(
        config,
        bus,
        clock,
        health,
        cards=cards,
        pool=pool,
        keys=keys,
        notifications=journal,
        admission=admission,
        requests=requests,
        orphans=orphans,
        runner=runner,
        pipeline=pipeline,
        keys_on=keys_needed(config),
        pages=pages,
    )


async def _warn_without_keys(router: Router) -> None:
    if router.keys_on and not await router.keys.any():
        _log.warning(
            "no_api_key",
            why=_why_keys(router.config),
            create="spillway keys create --tenant NAME",
        )


def _why_keys(config: RouterConfig) -> str:
    """Return why a router asks for keys, as the log says when there is none."""
    if config.keys == "on":
        return "SPILLWAY_KEYS is on, so every request needs a key, and there is none yet"
    return f"{config.host} can be reached from other machines, so every request needs a key, and there is none yet"


async def _drain(router: Router) -> None:
    """Refuse new work, finish what runs, hand over what cannot be finished."""
    router.health.draining()
    router.admission.draining = True
    _log.info("drain_began", active=router.active)
    loop = asyncio.get_running_loop()
    until = loop.time() + router.config.drain_s
    await router.pipeline.drain(max(until - loop.time() - CLOSE_S, 0.0))
    for end in (router.stop_streams, None):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(until - loop.time() - CLOSE_S, 0.1 if end else 1.0)):
                await router.quiet()
                break
        if end is not None:
            end()
    _log.info("drain_ended", active=router.active)


async def serve(config: RouterConfig, instance: str, stopping: asyncio.Event) -> None:
    """Run the router until `stopping` is set, then drain; TaskEnded if a background task ended by itself."""
    async with Supervisor(stopping) as supervisor:
        await _serve(config, instance, stopping, supervisor)


async def _serve(
    config: RouterConfig, instance: str, stopping: asyncio.Event, supervisor: Supervisor
) -> None:
    tls = tls_context(config)
    clock = SystemClock()
    health = Health(
        "router",
        instance=instance,
        data_dir=config.data_dir,
        waits_for=("bus", "workers"),
        supervisor=supervisor,
    )
    async with AsyncExitStack() as stack:
        bus = await open_bus(config, clock, health, stopping)
        if bus is None:
            return
        stack.push_async_callback(bus.close)
        router = await _assemble(config, bus, clock, health, stack)
        await router.pipeline.start()
        server = Server(router)
        try:
            port = await server.start(config.host, config.port, tls)
            runner = await health.serve(config.health_host, config.health_port, public_port=port)
        except OSError as error:
            raise ConfigError(
                f"SPILLWAY_HOST is {config.host!r}, SPILLWAY_PORT is {config.port}: {error.strerror or error}; "
                "expected an address that is free"
            ) from error
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(server.stop)
        watch = Watch(router)
        watch.start()
        stack.push_async_callback(watch.stop)
        await _warn_without_keys(router)
        _log.info(
            "router_started", host=config.host, port=port, tls=tls is not None, keys=router.keys_on
        )
        await stopping.wait()
        await _drain(router)
