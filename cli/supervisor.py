"""The supervisor: starts an instance's processes in order, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import uvloop

from cli import embedded
from cli.console import Console, plain
from cli.instance_plan import REDIS, REDIS_PAGES, InstancePlan, PlannedProcess, with_port
from cli.planned_services import as_note
from cli.process import Process, why_ended
from common import log
from common.clock import SystemClock
from common.errors import ConfigError, SpillwayError
from common.redis import durability

_ASK_S = 20.0
SERVERS = (REDIS, REDIS_PAGES)  # servers without a health port, whose logs tell when they are ready


class StartFailed(Exception):
    """The instance could not be started; the message names the part and the reason."""


class ServiceSupervisor:
    """Runs one plan until it is stopped."""

    def __init__(self, plan: InstancePlan, console: Console) -> None:
        self.plan = plan
        self.instance = plan.instance
        self.stopping = asyncio.Event()
        self.at_once = asyncio.Event()
        self._console = console
        self._log = log.get("supervisor")
        self._processes: dict[str, Process] = {}
        self._stages: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._state = "starting"
        self._sample = "none"
        self._http: aiohttp.ClientSession | None = None

    # -- events -----------------------------------------------------------------------------------

    def on_signal(self) -> None:
        """Stop in order at the first signal, at once at the second."""
        if self.stopping.is_set():
            self.at_once.set()
        self.stopping.set()
        self._changed.set()

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_line(self, process: Process, line: bytes, record: dict[str, Any]) -> None:
        if process.name in SERVERS:
            if embedded.READY in line:
                process.became_ready()
        elif record.get("event") == "health_served":
            process.health_port = int(record.get("health_port", 0))
            self._spawn(self._await_ready(process, process.pid), f"await-{process.name}")
        elif record.get("event") == "condition_changed" and process.state == "starting":
            if record.get("why"):
                self._console.step(process.name, str(record["why"]))
        else:
            self._console.record(process.name, record)

    def _on_state(self, process: Process) -> None:
        if process.state == "restarting":
            self._console.step(process.name, f"{why_ended(process.exit_code)}; starting it again")
        elif process.state == "failed":
            self._console.step(process.name, f"{why_ended(process.exit_code)}; given up")
        elif process.state in {"ready", "starting"}:
            self._console.step(process.name, process.state)
        if process.name in SERVERS and process.pid:
            self.instance.note(
                f"{process.name}-0", pid=process.pid, service=process.name, instance="0"
            )
        self._changed.set()
        self._write_note()

    def _write_note(self) -> None:
        processes = {
            name: {"state": process.state, "pid": process.pid, "restarts": process.restarts}
            for name, process in self._processes.items()
        }
        with contextlib.suppress(OSError):  # a full disk must not stop the services
            self.instance.note(
                "supervisor",
                pid=os.getpid(),
                url=self.plan.url,
                state=self._state,
                sample=self._sample,
                chat_model=self.plan.chat.shown,
                processes=processes,
                plan=None if self.plan.planned is None else as_note(self.plan.planned.plan),
            )

    async def _await_ready(self, process: Process, pid: int) -> None:
        """Ask the process' health endpoint, which answers as soon as the process is ready, until then."""
        assert self._http is not None
        host = self.plan.config.health_host
        host = "127.0.0.1" if host in {"0.0.0.0", "::"} else host
        url = f"http://{host}:{process.health_port}/readyz?wait={_ASK_S}"
        while process.pid == pid and not self.stopping.is_set():
            try:
                async with self._http.get(url) as response:
                    if response.status == 200 and process.pid == pid:
                        process.became_ready()
                        return
            except (aiohttp.ClientError, TimeoutError):
                return  # it has ended; the next start asks again

    # -- the start ----------------------------------------------------------------------------------

    def _start(self, part: PlannedProcess) -> Process:
        process = Process(
            part.name,
            part.argv,
            env={**self.plan.env, **part.env},
            log_path=self.instance.logs / f"{part.name}.log",
            death_signal=part.death_signal,
            cores=part.cores,
            on_line=self._on_line,
            on_state=self._on_state,
        )
        self._processes[part.name], self._stages[part.name] = process, part.stage
        process.start()
        return process

    async def _until_ready(self, until: float) -> None:
        """Wait until every process is ready; StartFailed if one fails."""
        while not self.stopping.is_set():
            waiting = [p for p in self._processes.values() if p.state != "ready"]
            if not waiting:
                return
            for process in waiting:
                if process.state == "failed":
                    raise StartFailed(self._why_failed(process))
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, until - time.monotonic()))
            except TimeoutError:
                names = ", ".join(process.name for process in waiting)
                raise StartFailed(
                    f"not ready after {self.plan.config.start_timeout_s:g} s: {names}; "
                    f"see {self.instance.logs}"
                ) from None

    def _why_failed(self, process: Process) -> str:
        lines = [line.decode(errors="replace") for line in process.last_lines]
        said = [line.removeprefix("spillway: ") for line in lines if line.startswith("spillway: ")]
        if process.exit_code == 2 and said:
            raise ConfigError(said[-1])
        tail = "\n".join(f"    {plain(line)[:300]}" for line in lines[-6:])
        return f"{process.name} {why_ended(process.exit_code)} again and again; its last lines:\n{tail}"

    async def _start_all(self) -> None:
        until = time.monotonic() + self.plan.config.start_timeout_s
        if self.plan.embedded:
            self._start(self.plan.redis())
            await self._until_ready(until)
            if self.plan.config.durability == "process":
                self._spawn(embedded.keep_synced(self.instance.redis), "sync")
        await self._check_durability()
        if self.plan.embedded_pages and not self.stopping.is_set():
            self._start(self.plan.redis_pages())
            await self._until_ready(until)
        self._console.step("chat model", self.plan.chat.shown)
        for part in self.plan.services():
            if not self.stopping.is_set():
                self._start(part)
        await self._until_ready(until)
        await self._until_models_are_known()

    async def _until_models_are_known(self) -> None:
        """Wait as long as routers may not know the last worker's models: who is told "ready" may ask for them."""
        from common.registry.models import FRESH_S  # noqa: PLC0415 - slow to import

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), FRESH_S)

    async def _check_durability(self) -> None:
        from common.bus import Bus  # noqa: PLC0415 - needed once, and slow to import

        if self.stopping.is_set():
            return
        config = self.plan.config
        if self.plan.embedded:
            import msgspec  # noqa: PLC0415

            config = msgspec.structs.replace(config, redis_url=self.instance.redis_url)
        try:
            patience_s = min(_ASK_S, config.start_timeout_s)
            bus = await Bus.open(config, SystemClock(), timeout_s=patience_s)
            try:
                await durability.check(bus.connection.call, config.durability)
            finally:
                await bus.close()
        except SpillwayError as error:
            raise StartFailed(f"the Redis server: {error.message}") from error

    # -- the run --------------------------------------------------------------------------------------

    async def run(self, done: Callable[[InstancePlan], None]) -> int:
        """Start, serve until the stop, and stop; return the exit status. `done` is called when all are ready."""
        timeout = aiohttp.ClientTimeout(total=_ASK_S + 10)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            self._state = "starting"
            self._write_note()
            try:
                await self._start_all()
                if not self.stopping.is_set():
                    self._state = "ready"
                    self._write_note()
                    self._console.detach()
                    self._spawn(self._load_sample(done), "sample")
                    await self._serve()
            finally:
                await self._stop_all()
        return 0 if self.stopping.is_set() else 1

    async def _serve(self) -> None:
        """Wait for the end: a signal, or a server that cannot be kept running."""
        while not self.stopping.is_set():
            redis = self._processes.get(REDIS)
            if redis is not None and redis.state == "failed":
                self._console.say(f"spillway: {self._why_failed(redis)}")
                return
            self._changed.clear()
            await self._changed.wait()

    async def _load_sample(self, done: Callable[[InstancePlan], None]) -> None:
        if self.plan.config.sample and self.plan.open_to_all:
            self._sample = "loading"
            self._write_note()
            try:
                sample = importlib.import_module("cli.sample")  # after the start

                await sample.load(
                    self.plan.url,
                    lambda text: self._console.step("sample", text),
                    data_dir=self.instance.data_dir,
                )
                self._sample = "loaded"
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - the services run without the sample, too
                self._sample = "failed"
                self._console.step("sample", f"not loaded: {error}")
            self._write_note()
        elif self.plan.config.sample:
            why = "this instance asks for API keys; with one, `spillway samples` loads them"
            self._console.step("sample", f"not loaded: {why}")
        done(self.plan)

    async def _stop_all(self) -> None:
        self._state = "stopping"
        self._write_note()
        for task in list(self._tasks):
            if task.get_name() == "sample":
                task.cancel()
        drain_s = self.plan.config.drain_s + 15.0
        for stage in sorted(set(self._stages.values()), reverse=True):
            names = [name for name, of in self._stages.items() if of == stage]
            for name in names:
                if self._processes[name].state not in {"failed", "stopped"}:
                    self._console.step(name, "stopping")
            await self._stop_stage([self._processes[name] for name in names], drain_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.instance.forget_notes()

    async def _stop_stage(self, processes: list[Process], drain_s: float) -> None:
        stops = {asyncio.create_task(p.stop(drain_s), name=p.name): p for p in processes}
        now = asyncio.create_task(self.at_once.wait())
        waiting: set[asyncio.Task[bool]] = {*stops, now}
        while not all(task.done() for task in stops) and not self.at_once.is_set():
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if self.at_once.is_set():
            for process in processes:
                process.signal(signal.SIGTERM if process.name == REDIS else signal.SIGKILL)
        for task, process in stops.items():
            if not await task:
                self._console.step(process.name, f"killed: not stopped within {drain_s:g} s")


def supervise(plan: InstancePlan, console: Console, done: Callable[[InstancePlan], None]) -> int:
    """Run an instance in this process until it is stopped; return the exit status."""
    plan.instance.prepare()
    with plan.instance.locked():
        ended = plan.instance.end_leftovers()
        if ended:
            console.step("leftovers", f"ended {ended} processes of an instance that had crashed")
        plan = with_port(plan)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_supervised(plan, console, done))
        except StartFailed as error:
            console.say(f"spillway: {error}")
            return 1


async def _supervised(
    plan: InstancePlan, console: Console, done: Callable[[InstancePlan], None]
) -> int:
    supervisor = ServiceSupervisor(plan, console)
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, supervisor.on_signal)
    try:
        return await supervisor.run(done)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
