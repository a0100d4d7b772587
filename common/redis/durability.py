"""Durability of the server: a check at the start that its settings keep the named level."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from common.errors import ConfigError

_ASKED = ("appendonly", "appendfsync", "maxmemory-policy", "min-replicas-to-write")


def problems(level: str, settings: Mapping[str, str]) -> list[str]:
    """Return one sentence per setting that breaks the promise of `level`; [] if all settings keep it.

    Settings that the server does not tell (managed services forbid CONFIG) count as right.
    """
    found = []
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        found.append(f"maxmemory-policy is {policy}, so it may drop work; expected noeviction")
    if level in {"process", "machine"} and settings.get("appendonly", "yes") != "yes":
        found.append("appendonly is no, so a restart loses accepted work; expected yes")
    fsync = settings.get("appendfsync", "always")
    if level == "process" and fsync == "everysec":
        found.append(
            "appendfsync is everysec, which may reply before write(2) while an fsync runs, so "
            "kill -9 loses work; expected no or always"
        )
    if level == "machine" and fsync != "always":
        found.append(f"appendfsync is {fsync}, so power loss loses work; expected always")
    if level == "replicated" and settings.get("min-replicas-to-write", "1") == "0":
        found.append("min-replicas-to-write is 0, so a failover loses work; expected 1 or more")
    return found


async def settings(call: Callable[..., Awaitable[Any]]) -> dict[str, str]:
    """Ask the server for the settings that matter; `call` runs one command. Empty if the server forbids CONFIG."""
    told: dict[str, str] = {}
    for name in _ASKED:
        try:
            reply = await call("CONFIG", "GET", name)
        except Exception as error:  # the client's error classes differ between bus and tests
            if "unknown command" in str(error).lower() or "noperm" in str(error).lower():
                return {}
            raise
        pairs = list(reply.items()) if isinstance(reply, Mapping) else [tuple(reply)]
        told |= {_text(pair[0]): _text(pair[1]) for pair in pairs if len(pair) == 2}
    return told


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


async def check(call: Callable[..., Awaitable[Any]], level: str) -> None:
    """Raise ConfigError if the server does not keep the durability that SPILLWAY_DURABILITY names."""
    wrong = problems(level, await settings(call))
    if wrong:
        raise ConfigError(
            f"the Redis server does not keep SPILLWAY_DURABILITY={level}: {'; '.join(wrong)}"
        )
