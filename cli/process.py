"""A supervised process: it is started, its output watched, restarted after a crash, and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
# A process that crashes this many times without becoming ready is given up, as it will hardly work later.
GIVE_UP_AFTER, GIVE_UP_NEVER_READY_AFTER = 8, 3
_PR_SET_PDEATHSIG = 1
_MAX_LINE = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class LogFile:
    """A log file of bounded size: at `cap_bytes` it becomes `<name>.1`, and so on to `keep`."""

    def __init__(self, path: Path, *, cap_bytes: int = 10 << 20, keep: int = 3) -> None:
        self.path = path
        self._cap_bytes = cap_bytes
        self._keep = keep
        self._file = path.open("ab")

    def write(self, line: bytes) -> None:
        """Append one line; a full disk loses log lines, never the service."""
        with contextlib.suppress(OSError):
            if self._file.tell() + len(line) > self._cap_bytes:
                self._rotate()
            self._file.write(line + b"\n")
            self._file.flush()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._keep - 1, 0, -1):
            older = Path(f"{self.path}.{number}")
            if older.exists():
                older.replace(f"{self.path}.{number + 1}")
        self.path.replace(f"{self.path}.1")
        self._file = self.path.open("ab")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Process:
    """A child that is kept running until `stop`.

    `on_line(process, line, record)` gets every printed line, parsed if it is JSON; `on_state(process)` is called after
    each change of `state`: "starting", "ready", "restarting", "failed" (given up), "stopped". The owner calls
    `became_ready()`. When the supervisor dies, the child gets `death_signal`. It runs on `cores`, by default on any.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        death_signal: int = signal.SIGKILL,
        cores: Sequence[int] = (),
        on_line: Callable[[Process, bytes, dict[str, Any]], None],
        on_state: Callable[[Process], None],
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.state = "stopped"
        self.pid = 0
        self.restarts = 0
        self.exit_code: int | None = None
        self.last_lines: deque[bytes] = deque(maxlen=30)
        self.health_port = 0
        self.over = asyncio.Event()
        self._log_path = log_path
        self._death_signal, self._cores = death_signal, tuple(cores)
        self._on_line = on_line
        self._on_state = on_state
        self._failures = 0
        self._give_up_after = GIVE_UP_NEVER_READY_AFTER
        self._stopping = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name=f"keep-{self.name}")

    def became_ready(self) -> None:
        """Record that the process is ready: its next crash counts as the first."""
        self._failures = 0
        self._give_up_after = GIVE_UP_AFTER
        self._set("ready")

    def _set(self, state: str) -> None:
        if self.state != state:
            self.state = state
            self._on_state(self)

    async def _keep_running(self) -> None:
        log_file = LogFile(self._log_path)
        try:
            while not self._stopping.is_set():
                self._set("starting")
                await self._run_once(log_file)
                if self._stopping.is_set():
                    break
                self._failures += 1
                # 2 is a wrong configuration: another start would fail, too
                if self._failures >= self._give_up_after or self.exit_code == 2:
                    self._set("failed")
                    return
                self.restarts += 1
                self._set("restarting")
                backoff_s = BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
            self._set("stopped")
        finally:
            log_file.close()
            self.over.set()

    async def _run_once(self, log_file: LogFile) -> None:
        self.health_port = 0
        self.last_lines.clear()
        started = time.monotonic()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self.env,
                start_new_session=True,  # only the supervisor handles Ctrl-C
                preexec_fn=self._before_exec,
            )
        except OSError as error:
            self.last_lines.append(str(error).encode())
            self.exit_code = 127
            return
        self.pid = self._child.pid
        if self._stopping.is_set():  # `stop` came while it was being started
            self.signal(signal.SIGTERM)
        await self._pump(self._child, log_file)
        self.exit_code = await self._child.wait()
        self._child = None
        kill_group(self.pid)  # its own children must not outlive it
        log_file.write(
            json.dumps(
                {
                    "event": "process_ended",
                    "process": self.name,
                    "status": self.exit_code,
                    "ran_s": round(time.monotonic() - started, 3),
                }
            ).encode()
        )

    def _before_exec(self) -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, self._death_signal, 0, 0, 0)
        if self._cores:
            os.sched_setaffinity(0, self._cores)

    async def _pump(self, child: asyncio.subprocess.Process, log_file: LogFile) -> None:
        assert child.stdout is not None
        rest = b""
        # A grandchild may hold the pipe open after the child's end, so wait for the child's end as well.
        ended = asyncio.create_task(child.wait())
        try:
            while True:
                read = asyncio.create_task(child.stdout.read(65536))
                await asyncio.wait({read, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    await asyncio.wait({read}, timeout=1.0)
                if not read.done():
                    read.cancel()
                    break
                data = read.result()
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line, log_file)
                if len(rest) > _MAX_LINE:
                    self._take(rest, log_file)
                    rest = b""
        finally:
            ended.cancel()
        if rest:
            self._take(rest, log_file)

    def _take(self, line: bytes, log_file: LogFile) -> None:
        log_file.write(line)
        self.last_lines.append(line)
        record: dict[str, Any] = {}
        if line.startswith(b"{"):
            with contextlib.suppress(ValueError):
                record = json.loads(line)
        self._on_line(self, line, record)

    def signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(number)

    def forget(self) -> None:
        """Do not restart the process any more."""
        self._stopping.set()

    async def stop(self, timeout_s: float) -> bool:
        """End the process by SIGTERM, after `timeout_s` by SIGKILL; return whether SIGTERM was enough."""
        self.forget()
        if self._task is None:
            return True
        self.signal(signal.SIGTERM)
        in_time = True
        try:
            await asyncio.wait_for(self.over.wait(), timeout_s)
        except TimeoutError:
            in_time = False
            self.signal(signal.SIGKILL)
        await self._task
        return in_time


def python(module: str, *flags: str) -> list[str]:
    """Return the command line that runs a Spillway module."""
    return [sys.executable, "-m", module, *flags]


def why_ended(status: int | None) -> str:
    """Return a sentence about the end of a process."""
    if status is None:
        return "did not end"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def kill_group(pid: int) -> None:
    """Kill a process and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
