"""A mesh of local processes in one directory: start, kill, restart and measure real services.

Benchmarks, fault runs and soak use it, so what they show is what `python -m services.<name>` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from bench import ROOT
from bench.mesh import probe, proc
from bench.mesh.memory_groups import MemoryGroups
from bench.mesh.probe import MeshError
from bench.mesh.processes import Service, standard
from cli import embedded
from cli.instance import Instance
from common.config import SupervisorConfig
from common.pages.store import NONE

REDIS, PAGES = "redis", "redis-pages"


@dataclass(slots=True)
class _Running:
    service: Service
    process: asyncio.subprocess.Process
    started_s: float
    restarts: int = 0


class LocalMesh:
    """Processes in one data directory; use as `async with Mesh(path, services) as mesh`.

    Beside the bus' Redis there is one for pages, of SPILLWAY_PAGES_BYTES, if a service keeps pages and none is named.
    Each process is put into its group of `groups`, if there is one. With `supervise` a process that dies is started
    again at once, as the supervisor does. Logs are in `<data_dir>/logs/<name>.log`. Nothing outlives `stop()`.
    """

    def __init__(
        self,
        data_dir: Path,
        services: Sequence[Service] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        durability: Literal["process", "machine"] = "process",
        supervise: bool = False,
        maxmemory: str = "1gb",
        python: str = sys.executable,
        groups: MemoryGroups | None = None,
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.services = {s.name: s for s in (standard() if services is None else services)}
        self.supervise = supervise
        self.restarts: list[tuple[float, str]] = []
        self._env = dict(env or {})
        self._instance = Instance.at(str(self.data_dir))
        settings = SupervisorConfig(
            data_dir=str(self.data_dir), durability=durability, redis_maxmemory=maxmemory
        )
        pages_bytes = int(self._env.get("SPILLWAY_PAGES_BYTES", settings.pages_bytes))
        self._config = msgspec.structs.replace(settings, pages_bytes=pages_bytes)
        named = "SPILLWAY_PAGES_URL" in self._env
        keep = any(service.keeps_pages for service in self.services.values())
        self._servers = [REDIS, *([PAGES] if keep and not named else [])]
        self._python, self._groups = python, groups
        self._running: dict[str, _Running] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._syncer: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(timeout_s=2)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self, timeout_s: float = 120.0) -> None:
        """Start the Redis servers, then every service; return when all are ready, MeshError if one fails."""
        self._instance.prepare()
        for name in self._servers:
            await self._spawn(name)
            await self.wait_ready(name, timeout_s)
        self._syncer = asyncio.create_task(self._sync(), name="mesh-sync")
        for name in self.services:
            await self._spawn(name)
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.services:
                    group.create_task(self.wait_ready(name, timeout_s))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def stop(self, timeout_s: float = 15.0) -> None:
        """End every process by SIGTERM, Redis last; SIGKILL to what has not gone by then."""
        tasks = [*self._keepers.values(), *([self._syncer] if self._syncer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keepers.clear()
        services = [r for name, r in self._running.items() if name not in self._servers]
        await _end(services, timeout_s)
        await _end([r for name, r in self._running.items() if name in self._servers], timeout_s)
        self._running.clear()

    # -- faults ------------------------------------------------------------------------------------

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one process and return its pid."""
        process = self._of(name).process
        if process.returncode is None:
            process.send_signal(number)
        return process.pid

    async def restart(self, name: str, timeout_s: float = 60.0) -> float:
        """Kill (-9) one process, start it again; return the seconds until it is ready."""
        began = time.monotonic()
        running = self._of(name)
        self.kill(name)
        await running.process.wait()
        if not self.supervise:
            await self._spawn(name)
        await self.wait_ready(name, timeout_s)
        return time.monotonic() - began

    def check_alive(self, name: str) -> None:
        """Raise MeshError if the named process has ended."""
        status = self._of(name).process.returncode
        if status is not None:
            raise MeshError(f"{name} ended with status {status}")

    async def wait_end(self, name: str, timeout_s: float = 60.0) -> int:
        """Wait until the named process has ended; return its exit status (TimeoutError if it does not)."""
        return await asyncio.wait_for(self._of(name).process.wait(), timeout_s)

    async def replaced(self, name: str, pid: int, timeout_s: float = 60.0) -> None:
        """Wait until the supervised process `name` is another one than `pid`, and ready."""
        async with asyncio.timeout(timeout_s):
            while self.pid(name) == pid:  # noqa: ASYNC110 - another process' life has no event
                await asyncio.sleep(0.02)
        await self.wait_ready(name, timeout_s)

    async def _keep(self, name: str) -> None:
        while True:
            running = self._of(name)
            began = running.started_s
            await running.process.wait()
            self.restarts.append((time.time(), name))
            await asyncio.sleep(0.1 if time.monotonic() - began > 5.0 else 1.0)
            await self._spawn(name)

    # -- what is seen ------------------------------------------------------------------------------

    @property
    def urls(self) -> list[str]:
        """Return the base URL of every router, in the order given."""
        flags = (s.flags for s in self.services.values() if s.module == "services.router")
        return [f"http://127.0.0.1:{f[f.index('--port') + 1]}" for f in flags]

    @property
    def url(self) -> str:
        """Return the first router's base URL."""
        return self.urls[0]

    @property
    def redis_url(self) -> str:
        """Return the address of the bus' Redis."""
        return self._instance.redis_url

    @property
    def pages_url(self) -> str:
        """Return the address of the Redis of pages; "none" if the mesh has none of its own."""
        return self._instance.pages_url if PAGES in self._servers else NONE

    def pid(self, name: str) -> int:
        """Return the pid of the named process."""
        return self._of(name).process.pid

    def names(self) -> list[str]:
        """Return every process' name, the Redis servers first."""
        return [*self._servers, *self.services]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds each process tree has used since it started."""
        return {n: proc.tree_cpu_seconds(r.process.pid) for n, r in self._running.items()}

    def rss_bytes(self) -> dict[str, int]:
        """Return the resident bytes of each process tree."""
        return {n: proc.tree_rss_bytes(r.process.pid) for n, r in self._running.items()}

    def log(self, name: str) -> str:
        """Return what the named process has written so far."""
        path = self.data_dir / "logs" / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def health_port(self, name: str) -> int | None:
        """Return the health port the named process wrote down, or None as long as it has not."""
        pid = self.pid(name)
        for path in (self.data_dir / "run").glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = msgspec.json.decode(path.read_bytes())
                if record.get("pid") == pid and record.get("health_port"):
                    return int(record["health_port"])
        return None

    async def is_ready(self, name: str) -> bool:
        """Ask the named process once whether it can take work."""
        if name in self._servers:
            bus = name == REDIS
            socket = self._instance.socket if bus else self._instance.pages_socket
            return await probe.answers_ping(socket)
        port = self.health_port(name)
        return port is not None and await probe.http_status("127.0.0.1", port, "/readyz") == 200

    async def wait_ready(self, name: str, timeout_s: float = 60.0) -> None:
        """Return when the named process is ready; MeshError with the end of its log if it fails."""
        limit = time.monotonic() + timeout_s
        while not await self.is_ready(name):
            dead = self._of(name).process.returncode is not None and not self.supervise
            if dead or time.monotonic() > limit:
                state = "ended" if dead else f"is not ready after {timeout_s:g} s"
                raise MeshError(f"{name} {state}; its log ends with:\n{self.log(name)[-2000:]}")
            await asyncio.sleep(0.03)

    # -- inside ------------------------------------------------------------------------------------

    def _of(self, name: str) -> _Running:
        if name not in self._running:
            raise MeshError(f"no process {name!r} in this mesh; there are {sorted(self._running)}")
        return self._running[name]

    async def _spawn(self, name: str) -> None:
        service = self.services.get(name)
        argv = self._server_argv(name) if service is None else self._argv(service)
        env = {k: v for k, v in os.environ.items() if not k.startswith("SPILLWAY_")}
        env |= {"PYTHONUNBUFFERED": "1"} | self._env | dict(service.env if service else {})
        if service is not None:
            env.setdefault("SPILLWAY_DURABILITY", self._config.durability)
            env.setdefault("SPILLWAY_REDIS_URL", self.redis_url)
            env.setdefault("SPILLWAY_PAGES_URL", self.pages_url)
        with (self.data_dir / "logs" / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=ROOT, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=proc.die_with_parent,
            )  # fmt: skip
        if self._groups is not None:
            self._groups.add(name, process.pid)
        if service is not None and service.cores:
            os.sched_setaffinity(process.pid, service.cores)
        before = self._running.get(name)
        kept = service or Service(name, "")
        restarts = before.restarts + 1 if before else 0
        self._running[name] = _Running(kept, process, time.monotonic(), restarts)
        if self.supervise and name not in self._keepers:
            self._keepers[name] = asyncio.create_task(self._keep(name), name=f"keep-{name}")

    def _argv(self, service: Service) -> list[str]:
        where = ["--data-dir", str(self.data_dir), "--instance", service.name.replace("_", "-")]
        stamped = ["bench.mesh.stamped", service.stamps] if service.stamps else []
        return [self._python, "-m", *stamped, service.module, *where, *service.flags]

    def _server_argv(self, name: str) -> list[str]:
        write = embedded.write_config if name == REDIS else embedded.write_pages_config
        settings = write(self._instance, self._config)
        return [str(embedded.binary(self._config)), str(settings)]

    async def _sync(self) -> None:
        """Sync the append-only file once a second, as the supervisor does."""
        while True:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(embedded.sync, self._instance.redis)


async def _end(running: Sequence[_Running], timeout_s: float) -> None:
    living = [r.process for r in running if r.process.returncode is None]
    for process in living:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
    waits = [asyncio.ensure_future(p.wait()) for p in living]
    if waits:
        await asyncio.wait(waits, timeout=timeout_s)
    for process, wait in zip(living, waits, strict=True):
        if not wait.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await wait
