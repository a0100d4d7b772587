"""One process' way to the pages Redis, which may be gone or hang: then it is said at once, and nobody waits for it.

As on the bus, a command in flight is never cancelled, since that leaves replies off by one: whoever waits may leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.clock import Clock
from common.errors import ConfigError

CONNECTIONS = 8
TIMEOUT_S = 2.0
CONNECT_S = 1.0
AGAIN_S = 1.0  # how long nobody asks a server that was away
_CLOSE_S = 0.25
SCRIPTS = ("put", "remove", "recount", "where")
_LUA = Path(__file__).parent / "lua"
_LOST = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    RedisClusterException,
    OSError,
    asyncio.TimeoutError,
    AttributeError,  # a Cluster's client, at a connection closed while it is being opened
)
_LOST_REPLIES = ("CLUSTERDOWN", "MASTERDOWN", "LOADING", "READONLY", "MISCONF", "NOREPLICAS")
Command = Sequence[Any]


class TierDown(Exception):
    """The pages Redis cannot be reached, or does not answer in time; it is asked again a little later."""


class PagesServer:
    """Commands and scripts against one server or one Cluster; each call raises TierDown within `timeout_s` + 1 s."""

    def __init__(
        self, url: str, clock: Clock, *, cluster: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._clock, self.cluster, self._timeout_s = clock, cluster, timeout_s
        self._source = {name: (_LUA / f"{name}.lua").read_text() for name in SCRIPTS}
        self._sha = {
            name: hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - EVALSHA's name of it
            for name, text in self._source.items()
        }
        self._redis = self._client(url)
        self._gate = asyncio.Semaphore(CONNECTIONS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lost = ""
        self._again_at = 0.0

    def _client(self, url: str) -> Any:
        options: dict[str, Any] = {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": CONNECT_S,
            "decode_responses": False,
            "protocol": 2,
        }
        try:
            if self.cluster:
                client: Any = RedisCluster.from_url(
                    url,
                    **options,
                    retry=Retry(NoBackoff(), 1),
                    max_connections=2 * CONNECTIONS,
                    require_full_coverage=False,
                    reinitialize_steps=0,  # else some moved slots close connections that are in use
                )
                for name in list(client.response_callbacks):
                    if not name.startswith(("CLUSTER", "COMMAND")):  # what the client itself reads
                        del client.response_callbacks[name]
                return client
            pool = BlockingConnectionPool.from_url(
                url, **options, retry=Retry(NoBackoff(), 0), max_connections=CONNECTIONS, timeout=10
            )
        except (ValueError, RedisError) as error:
            raise ConfigError(
                f"SPILLWAY_PAGES_URL is {url!r}: {error}; expected redis://, rediss://, unix:// or none"
            ) from error
        client = Redis(connection_pool=pool)
        client.response_callbacks.clear()  # raw replies: the same in every version and in a Cluster
        return client

    @property
    def up(self) -> bool:
        """False from a call that got no answer until one that did."""
        return not self._lost

    async def call(self, *command: Any) -> Any:
        """Run one command. TierDown; ResponseError for what the server refuses."""
        return await self._run(lambda: self._redis.execute_command(*command))

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one round trip (one a node); replies in order, a refused one as its ResponseError."""
        if not commands:
            return []

        async def execute() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, _LOST):
                    raise reply
            return replies

        replies: list[Any] = await self._run(execute)
        return replies

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run one script, sending it whole where the server does not know it."""
        try:
            return await self.call("EVALSHA", self._sha[name], len(keys), *keys, *args)
        except NoScriptError:
            return await self.call("EVAL", self._source[name], len(keys), *keys, *args)

    async def callers(self) -> list[Callable[..., Awaitable[Any]]]:
        """Return one way to run plain commands per server: the only one, or each primary of a Cluster."""
        if not self.cluster:
            return [self.call]
        await self.call("PING")  # after which the nodes are known

        def caller(node: Any) -> Callable[..., Awaitable[Any]]:
            async def call(*command: Any) -> Any:
                return await self._run(lambda: node.execute_command(*command))

            return call

        return [caller(node) for node in self._redis.get_primaries()]

    async def close(self) -> None:
        """Let commands in flight end, but those that wait for something, then close every connection."""
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in left:  # else a Cluster's client opens new connections for them
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()
            if not self.cluster:
                await self._redis.connection_pool.disconnect()

    # -- being away ------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        self._refuse_while_away()
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(self._timeout_s + CONNECT_S):
                return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller and caller.cancelling()):
                raise TierDown("the connection to the pages Redis was closed") from None
            raise
        except TimeoutError:
            raise TierDown(
                f"the pages Redis is busy: no reply within {self._timeout_s:g} s"
            ) from None

    async def _guarded(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async with self._gate:  # a Cluster's client fails, where a pool would wait
            self._refuse_while_away()
            if self._lost:  # this call finds out for all others
                self._again_at = self._clock.monotonic() + self._timeout_s + CONNECT_S
            try:
                if self.cluster:  # before it knows the nodes, its commands go to any of them
                    await self._redis.initialize()
                reply = await work()
            except _LOST as error:
                raise self._away(error) from error
            except ResponseError as error:
                if any(word in str(error) for word in _LOST_REPLIES):
                    raise self._away(error) from error
                self._lost = ""
                raise
            self._lost = ""
            return reply

    def _refuse_while_away(self) -> None:
        if self._lost and self._clock.monotonic() < self._again_at:
            raise TierDown(self._lost)

    def _away(self, error: Exception) -> TierDown:
        self._lost = f"the pages Redis is away ({type(error).__name__}: {error})"
        self._again_at = self._clock.monotonic() + AGAIN_S
        return TierDown(self._lost)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a waiter that left must not make the loop complain
