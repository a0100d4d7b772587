"""A real mesh under attack: three tenants with keys, what each owns, and a witness that must never notice."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.registry.api_keys import KeyStore
from tests.support.hostile import wire
from tests.support.mesh import Process
from tests.support.servers import Server

BODY_TIMEOUT_S = 2.0
MAX_BODY = 1_000_000
COSTS = ("--alpha", "0.0001", "--beta", "0.001")
TENANTS = ("mallory", "alice", "witness")
FACTS = {"water": "water over the dam", "fire": "fire in the hills", "air": "air and light"}


class World:
    """Valkey, a sim encoder and generator, vector_search, kv_store and a router with keys, each a process."""

    def __init__(self, directory: Path | None = None, redis: Server | None = None) -> None:
        self.directory = directory or Path(tempfile.mkdtemp(prefix="spillway-hostile-"))
        self.redis = (redis or Server("valkey")).start()
        self.processes = [
            self.spawn("gpu_worker", "--device", "sim", "--chat-model", "sim-chat", *COSTS),
            self.spawn("vector_search", "--search-threads", "1"),
            self.spawn_router("0"),
            self.spawn("kv_store", "--sweep-s", "1"),
        ]
        self.keys = asyncio.run(self._make_keys())
        self.port = self.router.ports()["port"]
        self._wait_ready()

    def spawn(self, service: str, *flags: str) -> Process:
        return Process(service, self.directory, self.redis.url, "0", *flags).start()

    def spawn_router(self, instance: str, *flags: str) -> Process:
        """Start a router with keys and short limits; the caller stops one it asked for."""
        limits = ["--body-timeout-s", str(BODY_TIMEOUT_S), "--max-body-bytes", str(MAX_BODY)]
        flags = ("--port", "0", "--keys", "on", "--drain-s", "3", *limits, *flags)
        return Process("router", self.directory, self.redis.url, instance, *flags).start()

    @property
    def router(self) -> Process:
        return self.processes[2]

    @property
    def search(self) -> Process:
        return self.processes[1]

    async def _make_keys(self) -> dict[str, str]:
        config = Common(data_dir=str(self.directory), redis_url=self.redis.url)
        bus = await Bus.open(config, SystemClock())
        try:
            store = KeyStore(bus)
            return {tenant: (await store.create(tenant))[1] for tenant in TENANTS}
        finally:
            await bus.close()

    def _wait_ready(self) -> None:
        give_up = time.monotonic() + 60
        while wire.ask(self.port, "GET", "/readyz?wait=5").status != 200:
            if time.monotonic() > give_up:
                raise RuntimeError(f"not ready: {self.logs()}")
        for target, word in (("/v1/models", "sim-chat"), ("/v1/sessions", "list")):
            while word not in str(wire.ask(self.port, "GET", target, key=self.keys["witness"])):
                if time.monotonic() > give_up:
                    raise RuntimeError(f"{target} is not ready: {self.logs()}")
                time.sleep(0.1)

    def ask(
        self,
        method: str,
        target: str | bytes,
        body: Any = None,
        *,
        tenant: str = "mallory",
        **more: Any,
    ) -> wire.Reply:
        """Send one request as a tenant; `body` is JSON, or bytes to be sent as they are."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return wire.ask(self.port, method, target, raw, key=self.keys[tenant], **more)

    def logs(self) -> dict[str, str]:
        """Return everything each process has written."""
        return {p.log.name: p.log.read_text(errors="replace") for p in self.processes}

    def alive(self) -> bool:
        """Return whether every process still runs as it was started."""
        return all(p.process is not None and p.process.poll() is None for p in self.processes)

    def close(self) -> None:
        for process in reversed(self.processes):
            if process.process is not None and process.process.poll() is None:
                process.kill()
        self.redis.close()


class Witness:
    """An honest tenant's embedding and search, over and over beside everything else."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rounds = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._round_over = threading.Condition()
        documents = [{"id": name, "text": text} for name, text in FACTS.items()]
        self._expect("POST", "/v1/collections", {"name": "facts"})
        self._expect("POST", "/v1/collections/facts/documents", {"documents": documents})
        self._vector = self._embed()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _expect(self, method: str, target: str, body: Any) -> Any:
        reply = self._world.ask(method, target, body, tenant="witness")
        assert reply.status in {200, 201}, (target, reply)
        return reply.json

    def _embed(self) -> Any:
        return self._expect("POST", "/v1/embeddings", {"input": FACTS["water"]})["data"][0]

    def check(self) -> None:
        """Embed and search once; AssertionError if the answer is not the right one."""
        assert self._embed() == self._vector
        for name, text in FACTS.items():
            found = self._expect("POST", "/v1/collections/facts/search", {"text": text, "k": 1})
            assert [hit["id"] for hit in found["data"]] == [name]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.check()
            except (AssertionError, OSError, ValueError) as error:
                self.wrong.append(repr(error)[:500])
            with self._round_over:
                self.rounds += 1
                self._round_over.notify_all()
            self._stop.wait(0.05)

    def served(self) -> None:
        """AssertionError if any round so far was wrong."""
        assert self.wrong == []

    def undisturbed(self) -> None:
        """Return once a round that began after this call is over; AssertionError if any round was wrong."""
        with self._round_over:
            wanted = self.rounds + 2
            assert self._round_over.wait_for(lambda: self.rounds >= wanted, timeout=30)
        assert self.wrong == []

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
