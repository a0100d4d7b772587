"""Health of a service: the conditions that it waits for, over HTTP in Kubernetes' terms, beside its metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import http_exceptions, web
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from common import log
from common.clock import SYSTEM, Clock
from common.errors import ConfigError
from common.metrics import build_info
from common.tasks import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterable

LIVE_WITHIN_S = 10.0
_MAX_WAIT_S = 30.0
_DIGITS = re.compile(r"[\d.]+")


def _is_fault(record: logging.LogRecord) -> bool:
    """Return whether a log record tells of a fault, not only of a client that did not speak HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError)


_http_log = logging.getLogger("spillway.health.http")
_http_log.addFilter(_is_fault)


class Health:
    """Conditions that one service waits for; ready when every named condition holds and it is not draining.

    `waits_for` names the conditions that must be `set` before the service is ready for the first time. With a
    `data_dir`, `serve` writes `<data_dir>/run/<service>-<instance>.json`, where `spillway status` finds it.
    """

    def __init__(
        self,
        service: str,
        *,
        instance: str = "0",
        data_dir: str | None = None,
        waits_for: Iterable[str] = (),
        supervisor: Supervisor | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """`supervisor` owns the process' background tasks, among them the task that calls `beat`."""
        self.service, self._clock = service, clock
        self.supervisor = supervisor or Supervisor()
        self.instance = instance
        self.is_draining = False
        self.started = False
        self._conditions: dict[str, tuple[bool, str]] = dict.fromkeys(
            waits_for, (False, "starting")
        )
        self._data_dir = Path(data_dir) if data_dir is not None else None
        self._beat_at = self._clock.monotonic()
        self._changed = asyncio.Event()
        self._log = log.get("health")

    def set(self, name: str, ready: bool, why: str = "") -> None:
        """Set whether one condition holds, and if not, the reason, for people."""
        before = self._conditions.get(name, (not ready, ""))
        now = (ready, "" if ready else why)
        self._conditions[name] = now
        # A reason that differs only in its numbers ("away for 3 s") is not logged again.
        if (before[0], _DIGITS.sub("", before[1])) != (ready, _DIGITS.sub("", now[1])):
            self._log.info("condition_changed", condition=name, ready=ready, why=now[1])
        if before != now:
            self._wake()

    def draining(self) -> None:
        """Make the service unready from now on, since the process is about to stop."""
        self.is_draining = True
        self._wake()

    @property
    def ready(self) -> bool:
        """True if new work can be taken now."""
        conditions = self._conditions.values()
        return bool(conditions) and not self.is_draining and all(ok for ok, _ in conditions)

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons why the service is not ready, by condition."""
        missing = {name: why or "no" for name, (ok, why) in self._conditions.items() if not ok}
        if self.is_draining:
            missing["draining"] = "the service is stopping"
        elif not self._conditions:
            missing["start"] = "starting"
        return missing

    def beat(self) -> None:
        """Record that the event loop turned."""
        self._beat_at = self._clock.monotonic()

    def _wake(self) -> None:
        self.started = self.started or self.ready
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, ready: bool, timeout_s: float) -> bool:
        """Wait until readiness equals `ready`; return whether it does after at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.ready != ready:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.ready == ready

    # -- HTTP ----------------------------------------------------------------------------------------

    def _answer(self, ok: bool) -> web.Response:
        body = {"service": self.service, "ok": ok, "reasons": self.reasons}
        return web.json_response(body, status=200 if ok else 503)

    async def livez(self, _request: web.Request) -> web.Response:
        """200 while the event loop turns; never looks at Redis."""
        return self._answer(self._clock.monotonic() - self._beat_at < LIVE_WITHIN_S)

    async def readyz(self, request: web.Request) -> web.Response:
        """200 if new work can be taken now; with `?wait=S`, 200 as soon as it can, 503 after S seconds."""
        try:
            wait_s = min(float(request.query.get("wait", "0")), _MAX_WAIT_S)
        except ValueError:
            wait_s = 0.0
        if wait_s > 0 and not self.ready:
            await self.wait_change(True, wait_s)  # noqa: FBT003
        return self._answer(self.ready)

    async def startupz(self, _request: web.Request) -> web.Response:
        """200 once the service has been ready for the first time."""
        return self._answer(self.started)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return all metrics in Prometheus' text format."""
        text = await asyncio.to_thread(generate_latest, REGISTRY)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def serve(self, host: str, port: int, *, public_port: int = 0) -> web.AppRunner:
        """Serve /livez /readyz /startupz /health /metrics; the caller awaits `runner.cleanup()` at the end.

        Port 0 takes a free one; OSError if the address cannot be used, ConfigError if the data directory cannot be
        written. `public_port` is written to the file for `spillway status`.
        """
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self.livez),
                web.get("/readyz", self.readyz),
                web.get("/health", self.readyz),
                web.get("/startupz", self.startupz),
                web.get("/metrics", self.metrics),
            ]
        )
        app.cleanup_ctx.append(self._beating)
        runner = web.AppRunner(app, access_log=None, logger=_http_log, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        health_port: int = runner.addresses[0][1]
        if "spillway_build_info" not in REGISTRY._names_to_collectors:
            build_info(self.service)
        try:
            self._note(health_port, public_port)
        except ConfigError:
            await runner.cleanup()
            raise
        self._log.info("health_served", host=host, health_port=health_port, port=public_port)
        return runner

    async def _beating(self, _app: web.Application):  # type: ignore[no-untyped-def]
        async def beat() -> None:
            while True:
                self.beat()
                await asyncio.sleep(1.0)

        task = self.supervisor.process(beat(), "health-beat")
        yield
        await self.supervisor.end(task)

    def _note(self, health_port: int, public_port: int) -> None:
        if self._data_dir is None:
            return
        path = self._data_dir / "run" / f"{self.service}-{self.instance}.json"
        note = {
            "pid": os.getpid(),
            "service": self.service,
            "instance": self.instance,
            "health_port": health_port,
            "port": public_port,
        }
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(note), encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            raise ConfigError(
                f"SPILLWAY_DATA_DIR is {str(self._data_dir)!r}: {error.strerror or error}; "
                "expected a directory that can be written"
            ) from error
