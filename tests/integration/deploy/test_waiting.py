"""Every service waits for Redis by itself: it says so, leaves when told, and serves once Redis is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from common.bus.scripts import IN_USE, Scripts
from tests.support.servers import Server, free_port
from tests.support.waiting import until_sync

ROOT = Path(__file__).parents[3]
SERVICES = {
    "router": ["--port", "0"],
    "gpu_worker": ["--device", "sim", "--chat-model", "sim"],
    "cpu_worker": ["--device", "sim"],
    "vector_search": [],
    "kv_store": [],
}
WAIT_S = 60.0


@contextlib.contextmanager
def started(service: str, url: str, place: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run one service against an address where nothing listens yet; gives the process and its log."""
    log = place / f"{service}.log"
    flags = ["--data-dir", str(place / service), *SERVICES[service]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{service}", *flags],
            cwd=ROOT,
            env={**os.environ, "SPILLWAY_REDIS_URL": url, "SPILLWAY_LOG_FORMAT": "json"},
            stdout=output,
            stderr=output,
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def events(log: Path) -> list[dict[str, Any]]:
    """Return the lines a service has logged."""
    lines = log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_event(log: Path, event: str) -> dict[str, Any]:
    """Wait until a service has logged an event."""

    def found() -> list[dict[str, Any]]:
        return [record for record in events(log) if record.get("event") == event]

    return until_sync(found, f"{event} in {log}", seconds=WAIT_S)[0]


def wait_ready(log: Path) -> None:
    """Wait until a service says that it can take work."""
    port = wait_event(log, "health_served")["health_port"]
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz?wait=20", timeout=30)
            return
        except urllib.error.HTTPError:
            continue
    raise AssertionError(f"not ready: {log.read_text()[-2000:]}")


def test_services_wait_for_redis(tmp_path: Path) -> None:
    """Each service says what it waits for, and is ready once Redis is there; none ends."""
    server = Server()
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        running = {
            name: stack.enter_context(started(name, server.url, tmp_path)) for name in SERVICES
        }
        for _, log in running.values():
            assert "Connection refused" in wait_event(log, "bus_awaited")["error"]
        server.start()
        for process, log in running.values():
            wait_ready(log)
            assert process.poll() is None


def test_a_waiting_service_stops_when_told(tmp_path: Path) -> None:
    """SIGTERM ends a service that waits, with status 0."""
    with started("cpu_worker", f"redis://127.0.0.1:{free_port()}", tmp_path) as (process, log):
        wait_event(log, "bus_awaited")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert "Traceback" not in log.read_text()


def test_a_server_that_keeps_less_is_refused(tmp_path: Path) -> None:
    """A service ends with status 2 and a sentence where Redis does not keep the durability that is asked for."""
    server = Server()
    server.options["appendonly"] = "no"
    server.start()
    try:
        with started("kv_store", server.url, tmp_path) as (process, log):
            assert process.wait(WAIT_S) == 2
            assert "appendonly is no, so a restart loses accepted work" in log.read_text()
    finally:
        server.close()


def test_versions_do_not_mix(tmp_path: Path) -> None:
    """A service waits while processes whose scripts differ are at work; one that meets them later says so."""
    server = Server().start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set(IN_USE, "other")
            with started("kv_store", server.url, tmp_path) as (process, log):
                error = wait_event(log, "bus_awaited")["error"]
                assert "scripts other, " in error
                assert f"ours are {Scripts().version}" in error
                client.delete(IN_USE)  # as when the processes of the other version have ended
                wait_ready(log)
                assert client.get(IN_USE) == Scripts().version.encode()
                client.set(IN_USE, "other", ex=60)
                assert wait_event(log, "bus_scripts_mixed")["theirs"] == "other"
                assert process.poll() is None
    finally:
        server.close()
