"""An instance, which is one data directory: its lock, the notes of its processes, and leftovers of a crash."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

_SOCKET_MAX_BYTES = 103  # the smallest limit of any Unix (macOS); Linux allows 107


@dataclass(frozen=True)
class Instance:
    """The files of one data directory."""

    data_dir: Path

    @classmethod
    def at(cls, data_dir: str) -> Instance:
        """Return the instance of a data directory, which need not exist."""
        try:
            path = Path(data_dir).expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"data directory {data_dir}: {error}; expected a path (SPILLWAY_DATA_DIR or --data-dir)"
            ) from error
        return cls(Path(os.path.realpath(path)))  # unlike resolve(), no error for links in a circle

    @property
    def run(self) -> Path:
        """The directory of the processes' notes: pids and ports."""
        return self.data_dir / "run"

    @property
    def logs(self) -> Path:
        """The directory of the services' logs."""
        return self.data_dir / "logs"

    @property
    def redis(self) -> Path:
        """The directory of the embedded server's data."""
        return self.data_dir / "redis"

    @property
    def socket(self) -> Path:
        """The embedded server's Unix socket; in a private directory under /tmp if the path is too long."""
        path = self.data_dir / "redis.sock"
        if len(os.fsencode(path)) <= _SOCKET_MAX_BYTES:
            return path
        name = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
        return Path(tempfile.gettempdir()) / f"spillway-{os.getuid()}-{name}" / "redis.sock"

    @property
    def redis_url(self) -> str:
        """The embedded server's address."""
        return f"unix://{self.socket}"

    @property
    def pages_socket(self) -> Path:
        """The Unix socket of the embedded server for KV pages."""
        return self.socket.with_name("pages.sock")

    @property
    def pages_url(self) -> str:
        """The address of the embedded server for KV pages."""
        return f"unix://{self.pages_socket}"

    def prepare(self) -> None:
        """Make the directories; ConfigError if the data directory cannot be written."""
        try:
            for path in (self.data_dir, self.run, self.logs, self.redis):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.socket.parent.mkdir(exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.data_dir):
                pass
        except OSError as error:
            raise ConfigError(
                f"data directory {self.data_dir}: {error.strerror}; "
                "expected a directory that can be written (SPILLWAY_DATA_DIR or --data-dir)"
            ) from error
        if self.socket.parent.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.socket.parent} belongs to another user; expected our own")

    # -- the lock ---------------------------------------------------------------------------------

    @property
    def _lock(self) -> Path:
        return self.data_dir / "lock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the data directory's lock; ConfigError if another instance runs on it."""
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"data directory {self.data_dir} is in use by process {self.holder() or '?'}; "
                    "expected one of its own, or `spillway down` first"
                ) from error
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            yield
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)

    def holder(self) -> int | None:
        """Return the pid of the supervisor that runs on this data directory, or None."""
        try:
            handle = os.open(self._lock, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            text = os.read(handle, 16)
            return int(text) if text.isdigit() else None
        finally:
            os.close(handle)
        return None

    # -- notes ------------------------------------------------------------------------------------

    def note(self, name: str, **values: Any) -> None:
        """Write a note under a name, in one atomic step."""
        path = self.run / f"{name}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(values), encoding="utf-8")
        fresh.replace(path)

    def read_note(self, name: str) -> dict[str, Any]:
        """Return a note, or {} if there is none."""
        path = self.run / f"{name}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return all notes by name."""
        names = sorted(path.stem for path in self.run.glob("*.json"))
        return {name: self.read_note(name) for name in names}

    def forget_notes(self) -> None:
        """Remove all notes."""
        for path in self.run.glob("*.json"):
            with contextlib.suppress(OSError):  # a directory is no note
                path.unlink(missing_ok=True)

    # -- leftovers --------------------------------------------------------------------------------

    def leftovers(self) -> list[int]:
        """Return the pids of processes that an earlier supervisor of this directory left running."""
        found = []
        for name, note in self.notes().items():
            pid = note.get("pid")
            if isinstance(pid, int) and name != "supervisor" and self._is_ours(pid):
                found.append(pid)
        return found

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return os.fsencode(self.data_dir) in command or os.fsencode(self.socket) in command

    def end_leftovers(self, grace_s: float = 5.0) -> int:
        """End the processes that an earlier supervisor left running, in order if possible; return their number."""
        pids = self.leftovers()
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + wait_s
            if all(wait_exit(pid, max(0.0, until - time.monotonic())) for pid in pids):
                break
        self.forget_notes()
        return len(pids)


def wait_exit(pid: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for the end of a process; return whether it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(handle)


def running_url(data_dir: str) -> str | None:
    """Return the router's URL of the instance that runs on a data directory, or None."""
    instance = Instance.at(data_dir)
    if instance.holder() is None:
        return None
    url = instance.read_note("supervisor").get("url")
    return url if isinstance(url, str) else None
