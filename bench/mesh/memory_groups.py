"""Memory limits for the processes of a mesh: a cgroup for each, below a directory that its caller may write."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from common.errors import ConfigError

_GONE_S = 5.0


class GroupUse(NamedTuple):
    """What the kernel says of a group: its limit and the most it held, bytes, and how often it was killed in."""

    limit: int
    peak: int
    kills: int


class MemoryGroupsError(ConfigError):
    """The directory cannot hold memory groups; the message says what is missing."""


class MemoryGroups:
    """A memory cgroup for each process named in `limits`, bytes, below `parent`; use as a context.

    `parent` is a directory of cgroup v1's memory hierarchy, or one of v2 whose `cgroup.subtree_control` has memory.
    At the end the groups are removed; a process still in one is killed. MemoryGroupsError if `parent` is neither, or
    may not be written.
    """

    def __init__(self, parent: Path, limits: Mapping[str, int]) -> None:
        self._parent, self._limits = parent, dict(limits)
        self._folders: dict[str, Path] = {}
        self._unified = (parent / "cgroup.controllers").exists()
        self.version = 2 if self._unified else 1

    def __enter__(self) -> Self:
        try:
            self._make()
        except OSError as error:
            self._remove()
            raise MemoryGroupsError(
                f"{self._parent}: {error.strerror}; expected a cgroup directory with the memory controller that may be "
                "written"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._remove()

    def add(self, name: str, pid: int) -> None:
        """Put a process into the group of its name; a name without a limit stays where it is."""
        if name in self._folders:
            (self._folders[name] / "cgroup.procs").write_text(f"{pid}\n")

    def use(self) -> dict[str, GroupUse]:
        """Return what each group held, by name."""
        return {name: self._use(name, folder) for name, folder in self._folders.items()}

    def _make(self) -> None:
        if self._unified and "memory" not in _read(self._parent / "cgroup.subtree_control").split():
            (self._parent / "cgroup.subtree_control").write_text("+memory")
        limit_file = "memory.max" if self._unified else "memory.limit_in_bytes"
        for name, limit in self._limits.items():
            folder = self._parent / f"spillway-{time.time_ns()}-{name}"
            folder.mkdir()
            self._folders[name] = folder
            if not (folder / limit_file).exists():
                raise FileNotFoundError(2, f"no {limit_file} in a new group")
            (folder / limit_file).write_text(str(limit))

    def _use(self, name: str, folder: Path) -> GroupUse:
        peak = "memory.peak" if self._unified else "memory.max_usage_in_bytes"
        events = "memory.events" if self._unified else "memory.oom_control"
        kills = dict(line.split() for line in _read(folder / events).splitlines()).get("oom_kill")
        return GroupUse(self._limits[name], int(_read(folder / peak) or 0), int(kills or 0))

    def _remove(self) -> None:
        for folder in self._folders.values():
            self._empty(folder)
        self._folders.clear()

    def _empty(self, folder: Path) -> None:
        give_up = time.monotonic() + _GONE_S
        while time.monotonic() < give_up:
            for pid in map(int, _read(folder / "cgroup.procs").split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
                return
            time.sleep(0.02)


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii") if path.exists() else ""
