"""The kv_store service, assembled: opens the bus, reads the lane of sessions, sweeps, keeps the pages, drains."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

from common.bus import Bus
from common.bus.startup import serve_on_bus, watch_bus
from common.config import StoreConfig
from common.health import Health
from common.ids import Family
from common.pages.store import PageStore
from common.registry.api_keys import KeyStore
from common.registry.trace_index import TraceIndex
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.serve_each import serve_each
from common.worker.worker import Worker
from services.kv_store.deletion.page_eraser import PageEraser
from services.kv_store.deletion.session_eraser import SessionEraser
from services.kv_store.deletion.sweep import Sweep
from services.kv_store.deletion.worker_eraser import WorkerEraser
from services.kv_store.job_handler import AT_ONCE, LOG_NAMES, SessionJobHandler
from services.kv_store.pages.eviction import limits_of
from services.kv_store.pages.page_keeper import PageKeeper
from services.kv_store.pages.page_locations import PageLocations
from services.kv_store.pages.session_pins import SessionPins
from services.kv_store.sessions.session_store import SessionStore

SERVICE = "kv_store"
FAMILY, CLASS = Family("sessions"), "kv"
_BETA_S = 0.05


async def serve(config: StoreConfig, instance: str, stopping: asyncio.Event) -> None:
    """Run one kv_store until `stopping`, then drain; ConfigError if it cannot start.

    TaskEnded if a background task ended without being told to.
    """
    work = partial(_work, config, stopping)
    await serve_on_bus(config, SERVICE, instance, stopping, work, waits_for=("bus", "lane"))


async def _work(config: StoreConfig, stopping: asyncio.Event, bus: Bus, health: Health) -> None:
    pages = PageStore.of(config, bus.clock)
    keys = KeyStore(bus)
    keeper = pins = None
    if pages is not None:
        limits = partial(limits_of, keys)
        keeper = PageKeeper(pages, Path(config.data_dir) / "pages", config.disk_bytes, limits)
        pins = SessionPins(bus, pages, limits)
    below = PageEraser(bus, pages, keeper) if pages and keeper else None
    eraser = SessionEraser(bus, below, WorkerEraser(bus))
    record = WorkerRecord(
        worker=incarnation_name("kv"),
        classes=[CLASS],
        device="cpu",
        depth_items=8 * AT_ONCE,
        depth_tokens=1 << 40,
        beta_s=_BETA_S,
        started_ms=bus.clock.now_ms(),
        pid=os.getpid(),
        service=SERVICE,
    )
    index = TraceIndex(bus)
    await index.begin()
    worker = Worker(bus, FAMILY, record, largest_items=1, largest_tokens=1)
    await worker.start()
    health.set("bus", ready=True)
    health.set("lane", ready=True)
    tasks = [
        bus.supervisor.process(watch_bus(bus, health, stopping), "watch"),
        bus.supervisor.process(Sweep(bus, eraser, config.sweep_s).run(), "sweep"),
        bus.supervisor.scoped(index.run, "indexing"),
    ]
    if keeper is not None:
        tasks.append(bus.supervisor.process(keeper.run(), "pages"))
    if pins is not None:
        tasks.append(bus.supervisor.process(pins.run(), "pins"))
    try:
        handler = SessionJobHandler(SessionStore(bus, eraser, pins), PageLocations(bus, pages))
        await serve_each(
            worker,
            handler.serve,
            AT_ONCE,
            names=LOG_NAMES,
            stopping=stopping,
            drain_s=config.drain_s,
        )
    finally:
        await bus.supervisor.end(*tasks)
        if pages is not None:
            await pages.close()
