"""The connections of a process to the pages Redis; if that server has gone or hangs, calls fail at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from common.clock import Clock
from common.redis.address import RedisAddress
from common.redis.client import Command, RedisClient
from common.redis.fail_fast import FailFastPolicy
from common.redis.scripts import ScriptSet

CONNECTIONS = 8
TIMEOUT_S = 2.0
CONNECT_S = 1.0
AGAIN_S = 1.0  # seconds in which calls fail at once after a failed call
_CLOSE_S = 0.25
SCRIPTS = ("put", "remove", "recount", "where", "erase", "erased", "note")
_EXPECTED = "redis://, rediss://, unix:// or none"
_LUA = Path(__file__).parent / "lua"


class TierDown(Exception):
    """The error for a pages Redis that cannot be reached or does not answer in time; later calls try again."""


class PagesServer:
    """Runs commands and scripts on a server or Cluster; an unanswered call raises TierDown in `timeout_s` + 1 s."""

    def __init__(
        self, url: str, clock: Clock, *, cluster: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.cluster = cluster
        self._scripts = ScriptSet.read(_LUA, SCRIPTS)
        self._policy = FailFastPolicy(
            clock,
            timeout_s=timeout_s + CONNECT_S,
            again_s=AGAIN_S,
            name="the pages Redis",
            down=TierDown,
        )
        self._client = RedisClient(
            RedisAddress(url, cluster, "SPILLWAY_PAGES_URL", _EXPECTED),
            self._policy,
            clock,
            timeout_s=timeout_s,
            connect_s=CONNECT_S,
            connections=CONNECTIONS,
        )

    @property
    def up(self) -> bool:
        """False after a call without an answer, until a later call gets one."""
        return not self._policy.breaker.failed

    async def call(self, *command: Any) -> Any:
        """Run one command. TierDown; OutOfMemoryError if the server is full, ResponseError for other refusals."""
        return await self._client.call(*command)

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one round trip per node; return their replies in order, a ResponseError for a refused one."""
        return await self._client.pipeline(commands)

    async def values(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands as `pipeline` does, but with replies that are not arrays; large values are not copied."""
        return await self._client.values(commands)

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script by its name, and load it if the server does not know it."""
        return await self._scripts.run(self.call, name, keys, args)

    async def callers(self) -> list[Callable[..., Awaitable[Any]]]:
        """Return, for each server (each primary of a Cluster), a function that runs a plain command there."""
        if self.cluster:
            await self.call("PING")  # by its first command the client learns the nodes
        return self._client.callers()

    async def close(self) -> None:
        """Wait for commands in flight, except blocking reads, then close all connections."""
        await self._client.close(_CLOSE_S)
