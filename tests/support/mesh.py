"""A real mesh for the router's tests: Valkey, a sim encoder, vector_search and a router, each a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers import Server

START_S = 100.0
ROOT = Path(__file__).resolve().parents[2]


class Process:
    """One service started as an operator would start it."""

    def __init__(self, service: str, data_dir: Path, url: str, instance: str, *flags: str) -> None:
        self.service, self.instance, self.data_dir = service, instance, data_dir
        self._command = [sys.executable, "-m", f"services.{service}", "--data-dir", str(data_dir)]
        self._command += ["--instance", instance, *flags]
        self._env = {**os.environ, "SPILLWAY_REDIS_URL": url, "SPILLWAY_LOG_FORMAT": "json"}
        self._env.setdefault("SPILLWAY_PAGES_URL", "none")
        for name in ("SPILLWAY_PROFILE", "SPILLWAY_SEED"):
            self._env.pop(name, None)
        self.log = data_dir / f"{service}-{instance}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def note(self) -> Path:
        return self.data_dir / "run" / f"{self.service}-{self.instance}.json"

    def start(self) -> Process:
        self.note.unlink(missing_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, stdout=out, stderr=out
            )
        return self

    def ports(self) -> dict[str, int]:
        give_up = time.monotonic() + START_S
        while not self.note.exists():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{self.service} did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)
        note: dict[str, int] = json.loads(self.note.read_text())
        return note

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def halt(self) -> None:
        """Let the process run no more until `wake`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Halt the process, so that what it works on cannot end meanwhile."""
        self.halt()
        try:
            yield
        finally:
            self.wake()

    def stop(self) -> int:
        if self.process is None or self.process.poll() is not None:
            return 0
        return self.kill(signal.SIGTERM)


class Mesh:
    """Everything needed to serve embeddings and search; `url` is the first router's."""

    def __init__(self, server: str = "valkey") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="spillway-mesh-"))
        self.redis = Server(server).start()
        self.processes: list[Process] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.worker = self.add(
            "gpu_worker", "0", "--device", "sim", "--alpha", "0.0002", "--threads", "1"
        )
        self.search = self.add("vector_search", "0")
        self.router = self.add_router("0")
        self.url = self.address(self.router)
        self.wait_ready(self.url)

    def add(self, service: str, instance: str, *flags: str) -> Process:
        made = Process(service, self.directory, self.redis.url, instance, *flags).start()
        self.processes.append(made)
        return made

    def add_router(self, instance: str, *flags: str) -> Process:
        return self.add("router", instance, "--port", "0", "--drain-s", "5", *flags)

    def add_generator(self, beta: float = 0.0001) -> Process:
        """Start a sim generator, `sim-chat`, and wait until the router knows it; a step takes `beta` seconds."""
        flags = ("--embed-model", "none", "--chat-model", "sim", "--threads", "1")
        made = self.add("gpu_worker", "chat", "--device", "sim", "--beta", str(beta), *flags)
        give_up = time.monotonic() + START_S
        while (
            b'"sim-chat"' not in urllib.request.urlopen(f"{self.url}/v1/models", timeout=10).read()
        ):
            if time.monotonic() > give_up:
                raise RuntimeError(f"no generator: {made.log.read_text()[-4000:]}")
            time.sleep(0.1)
        return made

    @staticmethod
    def address(router: Process, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{router.ports()['port']}"

    @staticmethod
    def wait_ready(url: str) -> None:
        give_up = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/readyz?wait=5", timeout=10):
                    return
            except OSError as error:
                if time.monotonic() > give_up:
                    raise RuntimeError(f"{url} is not ready: {error}") from error
                time.sleep(0.05)

    @staticmethod
    def wait_model(url: str, kind: str) -> None:
        """Wait until a router knows a model of this kind: it is ready with the first one of any."""
        Mesh._wait_listed(url, "kind", kind)

    @staticmethod
    def wait_generator(url: str, name: str) -> None:
        """Wait until a router knows the model of this name."""
        Mesh._wait_listed(url, "id", name)

    @staticmethod
    def _wait_listed(url: str, field: str, value: str) -> None:
        give_up = time.monotonic() + START_S
        while True:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
                if any(model[field] == value for model in json.load(response)["data"]):
                    return
            if time.monotonic() > give_up:
                raise RuntimeError(f"{url} knows no model whose {field} is {value}")
            time.sleep(0.05)

    def logs(self) -> dict[str, Any]:
        return {p.log.name: p.log.read_text()[-3000:] for p in self.processes}

    def close(self) -> None:
        for process in self.processes:
            if process.process is not None and process.process.poll() is None:
                process.kill()
        self.redis.close()
        shutil.rmtree(self.directory, ignore_errors=True)
