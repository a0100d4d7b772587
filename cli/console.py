"""The console of an instance's start: prints its progress, one line an event."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

READY = "READY"
_HIDDEN = frozenset({"event", "level", "at", "service", "exception", "stack"})
_QUIET_S = 5.0


class Console:
    """Prints to stdout and, for `--detach`, to the pipe at which the starting command listens."""

    def __init__(self, status_fd: int | None = None) -> None:
        self._began = time.monotonic()
        self._status = os.fdopen(status_fd, "w", buffering=1) if status_fd is not None else None
        self._shown: dict[tuple[str, str], float] = {}

    def say(self, text: str = "") -> None:
        """Print one line."""
        for stream in (sys.stdout, self._status):
            if stream is None:
                continue
            try:
                stream.write(f"{text}\n")
                stream.flush()
            except (OSError, ValueError):
                pass  # the terminal is gone; the services run on

    def step(self, what: str, how: str) -> None:
        """Print one step of the start with the seconds since it began."""
        self.say(f"  {time.monotonic() - self._began:6.1f} s  {what:<16} {how}")

    def detach(self) -> None:
        """Tell the command that waits for the start that all processes are ready."""
        if self._status is not None:
            status, self._status = self._status, None
            try:
                status.write(f"{READY}\n")
                status.close()
            except OSError:
                pass

    def record(self, name: str, record: dict[str, Any]) -> None:
        """Print a service's warning or error in brief; a repeated one at most every 5 s."""
        if record.get("level") not in {"warning", "error", "critical"}:
            return
        event = str(record.get("event", ""))
        now = time.monotonic()
        if now - self._shown.get((name, event), -_QUIET_S) < _QUIET_S:
            return
        if len(self._shown) > 1000:
            self._shown.clear()
        self._shown[name, event] = now
        rest = " ".join(f"{key}={value}" for key, value in record.items() if key not in _HIDDEN)
        self.say(f"  {name}: {record['level']}: {event} {rest}"[:240])


def plain(line: str) -> str:
    """Return a log line for people: a JSON record as its event, its values and its exception."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict):
        return line
    rest = [f"{key}={value}" for key, value in record.items() if key not in _HIDDEN]
    raised = str(record.get("exception", "")).strip().splitlines()[-1:]
    return " ".join([str(record.get("event", "")), *rest, *raised])
