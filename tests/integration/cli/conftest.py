"""Runs the real `spillway` command; with stub services where only the supervisor is on trial."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import LIMIT_S, until_sync

ROOT = Path(__file__).resolve().parent.parent.parent.parent
COMMAND_S = 150.0  # `up` takes a tenth of that, but not on a slow machine with tests beside it
STUB = """
import asyncio, os, signal, sys
from common import arguments, lifecycle, log
from common.config import {cls} as Config
from common.errors import ConfigError
from common.health import Health

config, instance = arguments.parse(Config, sys.argv[1:], os.environ)
log.setup("{name}", config)

async def main(stopping):
    how = os.environ.get("STUB_{name}", "")
    if how == "crash":
        raise RuntimeError("the stub was told to crash")
    if how == "config":
        raise ConfigError("SPILLWAY_EMBED_MODEL is 'x': expected a model")
    health = Health("{name}", instance=instance, data_dir=config.data_dir, waits_for=("start",))
    runner = await health.serve(
        config.health_host, config.health_port, public_port=getattr(config, "port", 0)
    )
    health.set("start", True)
    await stopping.wait()
    health.draining()
    if how == "stubborn":
        await asyncio.sleep(60)
    await runner.cleanup()

sys.exit(lifecycle.run(main, config.drain_s))
"""
SERVICES = {
    "router": "RouterConfig",
    "gpu_worker": "WorkerConfig",
    "cpu_worker": "WorkerConfig",
    "vector_search": "SearchConfig",
    "kv_store": "StoreConfig",
}


class Spillway:
    """The command, run in one working directory with one data directory unless told otherwise."""

    def __init__(self, cwd: Path, data_dir: Path) -> None:
        self.cwd = cwd
        self.data_dir = data_dir
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SPILLWAY_")}

    def _words(self, words: tuple[str, ...], data_dir: Path | None) -> list[str]:
        place = ["--data-dir", str(data_dir or self.data_dir)]
        return [sys.executable, "-m", "cli.main", *words, *place]

    def run(
        self, *words: str, data_dir: Path | None = None, timeout: float = COMMAND_S, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return self._done(words, data_dir, env, timeout)

    def run_alone(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command that has nothing to do with the data directory to its end."""
        return subprocess.run(
            [sys.executable, "-m", "cli.main", *words],
            cwd=self.cwd,
            env={**self.env, **env},
            capture_output=True,
            check=False,
            text=True,
            timeout=120,
        )

    def _done(
        self,
        words: tuple[str, ...],
        data_dir: Path | None,
        env: dict[str, str],
        timeout: float = COMMAND_S,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._words(words, data_dir),
            cwd=self.cwd,
            env={**self.env, **env},
            capture_output=True,
            check=False,
            text=True,
            timeout=timeout,
        )

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start a command that stays in the foreground."""
        return subprocess.Popen(
            self._words(words, None),
            cwd=self.cwd,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def up(self, *words: str, data_dir: Path | None = None, **env: str) -> str:
        """Start a detached instance and return its URL."""
        done = self._done(("up", "--detach", "--port", "0", *words), data_dir, env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split("ready at ")[1].split()[0]

    def status(self, data_dir: Path | None = None) -> dict[str, Any]:
        """Return what `status --json` says."""
        found: dict[str, Any] = json.loads(self.run("status", "--json", data_dir=data_dir).stdout)
        return found

    def pids(self) -> dict[str, int]:
        """Return the pid of every process by name."""
        return {service["name"]: service["pid"] for service in self.status()["services"]}

    def processes(self, data_dir: Path | None = None) -> list[int]:
        """Return every process on this machine whose command line names the data directory."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if os.fsencode(data_dir or self.data_dir) in command:
                    found.append(int(entry.name))
        return found

    def until(self, what: Callable[[], bool], seconds: float = LIMIT_S) -> None:
        """Wait until a condition is true; the supervisor's log is in the error."""
        try:
            until_sync(what, seconds=seconds)
        except AssertionError as never:
            raise AssertionError(f"{never}\n{self.logs()}") from None

    def logs(self) -> str:
        """Return the supervisor's log."""
        path = self.data_dir / "logs" / "supervisor.log"
        return path.read_text() if path.exists() else ""

    def clean_up(self, data_dir: Path | None = None) -> None:
        """End whatever is left."""
        for pid in self.processes(data_dir):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Spillway]:
    """The command with the real services."""
    made = Spillway(ROOT, tmp_path / "data")
    yield made
    made.clean_up(tmp_path)


@pytest.fixture
def stubbed(tmp_path: Path) -> Iterator[Spillway]:
    """The command with services that start at once and do nothing."""
    home = tmp_path / "home"
    for name, cls in SERVICES.items():
        package = home / "services" / name
        package.mkdir(parents=True)
        (package / "__main__.py").write_text(STUB.format(name=name, cls=cls))
    (
        home / "services" / "__init__.py"
    ).touch()  # else a checkout's package on PYTHONPATH is found first
    made = Spillway(home, tmp_path / "data")
    made.env["SPILLWAY_SAMPLE"] = "no"
    made.env["SPILLWAY_OVERFLOW_WORKERS"] = "1"  # every kind of service, whatever devices are here
    yield made
    made.clean_up(tmp_path)
