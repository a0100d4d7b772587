"""A checkout of Spillway and an instance of it, driven by nothing but the command line, so that any version will do."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
# The same arithmetic on every machine, no parcel that may go to one lane or another, and pages that reach Redis.
SETTINGS = {
    "SPILLWAY_DTYPE": "fp32",
    "SPILLWAY_CHAT_DTYPE": "fp32",
    "SPILLWAY_OVERFLOW_WORKERS": "0",
    "SPILLWAY_PAGE_PUBLISH": "through",
    "SPILLWAY_HOST_KV_BYTES": "67108864",
}


class Checkout:
    """A source tree whose console script runs with its own code, whatever is installed."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root.resolve()

    @functools.cached_property
    def entry(self) -> str:
        """Return Python code that runs the `spillway` command of this tree."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        module, _, function = project["project"]["scripts"]["spillway"].partition(":")
        return f"import sys; from {module} import {function}; sys.exit({function}())"

    def command(self, *words: str) -> list[str]:
        """Return the command line of `spillway` with these words."""
        return [sys.executable, "-c", self.entry, *words]

    def env(self, **settings: str) -> dict[str, str]:
        """Return the environment without settings of the caller's own, with this tree's code first."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("SPILLWAY_")}
        path = os.pathsep.join([str(self.root), str(self.root / "client")])
        return {**kept, "PYTHONPATH": path, **settings}

    def run(
        self, *words: str, timeout_s: float = 300, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `spillway` with these words to its end."""
        return subprocess.run(
            self.command(*words),
            cwd=self.root,
            env=self.env(**settings),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


class Instance:
    """One data directory and what runs on it."""

    def __init__(self, checkout: Checkout, data_dir: Path, **settings: str) -> None:
        self.checkout, self.data_dir = checkout, data_dir.resolve()
        self.settings = {**SETTINGS, **settings}
        self.url = ""

    def start(self) -> Instance:
        """Start everything; RuntimeError with what was written if it does not become ready."""
        words = ("up", "--detach", "--port", "0", "--no-sample")
        done = self.cli(*words, timeout_s=START_S)
        if done.returncode:
            raise RuntimeError(f"not started: {done.stdout}{done.stderr}{self.logs()}")
        self.url = done.stdout.split("ready at ")[1].split()[0]
        return self

    def begin(self) -> subprocess.Popen[bytes]:
        """Start everything in a process of its own and return at once."""
        words = ("up", "--port", "0", "--no-sample", "--data-dir", str(self.data_dir))
        return subprocess.Popen(
            self.checkout.command(*words),
            cwd=self.checkout.root,
            env=self.checkout.env(**self.settings),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def cli(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of this instance to its end."""
        place = ("--data-dir", str(self.data_dir))
        return self.checkout.run(*words, *place, timeout_s=timeout_s, **self.settings)

    def said(self, *words: str) -> str:
        """Run a command that must succeed and return what it printed."""
        done = self.cli(*words)
        if done.returncode:
            raise RuntimeError(f"spillway {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def note(self, name: str) -> dict[str, Any]:
        """Return what a process noted about itself: pid and ports."""
        found: dict[str, Any] = json.loads((self.data_dir / "run" / f"{name}.json").read_text())
        return found

    def stop(self) -> None:
        """Drain and stop everything."""
        done = self.cli("down")
        if done.returncode or self.processes():
            raise RuntimeError(f"not stopped: {done.stdout}{done.stderr}{self.logs()}")

    def processes(self) -> list[int]:
        """Return the processes whose command line names the data directory, zombies left out."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if os.fsencode(self.data_dir) in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End every process with SIGKILL, the supervisor first, so that none is started again."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            _kill(self.note("supervisor")["pid"], self.processes())
        while left := self.processes():
            for pid in left:
                _kill(pid, left)
            time.sleep(0.02)

    def logs(self) -> str:
        """Return the ends of all logs."""
        paths = sorted((self.data_dir / "logs").glob("*.log"))
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths
        )


def _kill(pid: int, ours: list[int]) -> None:
    if pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
