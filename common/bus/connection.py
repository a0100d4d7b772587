"""One process' way to Redis: plain commands and the scripts, over lost connections, without cancelled commands.

redis-py leaves replies off by one when a command in flight is cancelled, so every command runs to its end in a task of
its own; whoever waits may leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from common import log
from common.bus import metrics
from common.bus.scripts import Scripts
from common.clock import SystemClock
from common.config import Common
from common.errors import ConfigError, Unavailable

BLOCK_MS = 1000
CONNECTIONS = 64
SLOW_S = 3.0  # a reply slower than this may mean that heartbeats lapsed while Redis stood still
RESYNC_S = 5.0
_log = log.get("bus")
_LOST = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ClusterDownError,
    TryAgainError,
    ReadOnlyError,
    RedisClusterException,
    OSError,
    asyncio.TimeoutError,
)
_LOST_REPLIES = (
    "NOREPLICAS",
    "MISCONF",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "LOADING",
    "READONLY",
    "UNBLOCKED",
)


class BusDown(Unavailable):
    """503: Redis cannot be reached, or takes no writes now."""

    default_code = "bus_down"


class BusFull(Unavailable):
    """503: Redis is full; running work goes on, new work is refused."""

    default_code = "bus_full"


class MixedScripts(Unavailable):
    """503: processes of another version still run on this Redis."""

    default_code = "bus_mixed"


def redis_url(config: Common) -> str:
    """Return the configured address, or the embedded server's socket."""
    return config.redis_url or f"unix://{Path(config.data_dir).resolve() / 'redis.sock'}"


class Connection:
    """Commands and scripts against one Redis or one Cluster; `reachable_since` is by `clock.monotonic()`."""

    def __init__(self, config: Common, clock: SystemClock) -> None:
        self.config = config
        self.clock = clock
        self.cluster = config.redis_cluster
        self.url = redis_url(config)
        self._scripts = Scripts()
        self._claims = False
        self._redis = self._client(socket_timeout=5.0, connections=CONNECTIONS)
        self._blocking = self._client(socket_timeout=BLOCK_MS / 1000 + 5, connections=100_000)
        self._gate = asyncio.Semaphore(CONNECTIONS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.reachable_since: float | None = None
        self._lost_at = clock.monotonic()
        self._synced = clock.monotonic()

    def _client(self, socket_timeout: float, connections: int) -> Any:
        options: dict[str, Any] = {
            "socket_timeout": socket_timeout,
            "socket_connect_timeout": 3.0,
            "retry": Retry(NoBackoff(), 0),
            "decode_responses": False,
            "protocol": 2,
        }
        try:
            if self.cluster:
                client: Any = RedisCluster.from_url(
                    self.url,
                    **{**options, "retry": Retry(NoBackoff(), 1)},
                    max_connections=connections,
                    require_full_coverage=False,
                )
                for name in list(client.response_callbacks):
                    if not name.startswith(("CLUSTER", "COMMAND")):  # what the client itself reads
                        del client.response_callbacks[name]
                return client
            pool = BlockingConnectionPool.from_url(
                self.url, **options, max_connections=connections, timeout=10
            )
        except (ValueError, RedisError) as error:
            raise ConfigError(
                f"SPILLWAY_REDIS_URL is {self.url!r}: {error}; expected redis://, rediss:// or unix://"
            ) from error
        client = Redis(connection_pool=pool)
        client.response_callbacks.clear()  # raw replies: the same in every version and in a Cluster
        return client

    @property
    def reachable(self) -> bool:
        """True if the last command reached Redis."""
        return self.reachable_since is not None

    def down_s(self) -> float:
        """Seconds since Redis was last reached; 0.0 if it is reachable."""
        return 0.0 if self.reachable else self.clock.monotonic() - self._lost_at

    def reached_for(self) -> float:
        """Seconds for which Redis has been reached without a break."""
        since = self.reachable_since
        return 0.0 if since is None else self.clock.monotonic() - since

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Wait until Redis answers and measure the offset to its clock; BusDown after `timeout_s`."""
        seconds, micros = await self.call("TIME", timeout_s=timeout_s)
        self._adopt(int(seconds) * 1000 + int(micros) // 1000)

    def _adopt(self, redis_ms: int) -> None:
        self.clock.offset_ms += redis_ms - self.clock.now_ms()

    async def _resync(self) -> None:
        """Every few seconds: measure the offset again, as a clock may step on either side; renew the claim."""
        with contextlib.suppress(BusDown, BusFull):
            await self.connect(timeout_s=1.0)
            if self._claims and (other := await self._scripts.claim(self.call)):
                _log.error("bus_scripts_mixed", ours=self._scripts.version, theirs=other)

    async def claim_scripts(self) -> None:
        """Say from now on which scripts this process uses; MixedScripts while others use others."""
        other = None
        with contextlib.suppress(BusFull):  # what was accepted must be worked off even then
            other = await self._scripts.claim(self.call)
        if other is not None:
            raise MixedScripts(
                f"processes of another version use this Redis (scripts {other}, "
                f"ours are {self._scripts.version}); stop them"
            )
        self._claims = True

    def suspect(self) -> None:
        """Count from now on how long Redis has been reached: it, or all, may have stood still."""
        if self.reachable_since is not None:
            self.reachable_since = self.clock.monotonic()

    async def close(self) -> None:
        """Let commands in flight end, then close every connection."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        for client in (self._redis, self._blocking):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()
            if not self.cluster:
                with contextlib.suppress(RedisError, OSError):
                    await client.connection_pool.disconnect()

    async def call(self, *command: Any, timeout_s: float = 10.0) -> Any:
        """Run one command; retried with backoff while Redis is away, for `timeout_s`, then BusDown."""
        return await self._persist(self._redis, command, timeout_s)

    async def blocking(self, *command: Any) -> Any:
        """Run one blocking read on a connection of its own; one try: BusDown if it is lost."""
        return await self._persist(self._blocking, command, 0.0)

    async def script(
        self, name: str, keys: Sequence[str], args: Sequence[Any], *, timeout_s: float = 10.0
    ) -> Any:
        """Run one of the scripts, loading it where Redis does not know it."""
        wait = self.config.durability == "replicated" and name in {"admit", "finish"}
        client = _Replicated(self._redis, keys[0], cluster=self.cluster) if wait else self._redis
        head = ("EVALSHA", self._scripts.sha[name], len(keys), *keys, *args)
        try:
            return await self._persist(client, head, timeout_s)
        except NoScriptError:
            whole = ("EVAL", self._scripts.source[name], len(keys), *keys, *args)
            return await self._persist(client, whole, timeout_s)

    async def _persist(self, client: Any, command: Sequence[Any], timeout_s: float) -> Any:
        deadline, pause = self.clock.monotonic() + timeout_s, 0.02
        while True:
            began = self.clock.monotonic()
            try:
                reply = await self._once(client, command)
            except _LOST as error:
                lost: Exception = error
            except NoScriptError:
                raise
            except OutOfMemoryError as error:
                raise BusFull(
                    "the bus is full; running work goes on, try again later", retry_after_s=5
                ) from error
            except ResponseError as error:
                text = str(error)
                if "OOM" in text or "used memory" in text:
                    raise BusFull(
                        "the bus is full; running work goes on, try again later", retry_after_s=5
                    ) from error
                if not any(word in text for word in _LOST_REPLIES):  # in a script: not at the front
                    raise
                lost = error
            else:
                took_s = self.clock.monotonic() - began
                self._reached(took_s)
                if client is not self._blocking:
                    metrics.CALL_SECONDS.observe(took_s)
                return reply
            self._missed()
            left = deadline - self.clock.monotonic()
            if left <= 0:
                raise BusDown(
                    f"the bus is away ({type(lost).__name__}: {lost})", retry_after_s=2
                ) from lost
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left))
            pause = min(pause * 2, 1.0)

    def _nodes(self) -> list[Any]:
        """Clients that together see every key: the server, or each primary of a Cluster."""
        return list(self._redis.get_primaries()) if self.cluster else [self._redis]

    def callers(self) -> list[Callable[..., Awaitable[Any]]]:
        """Return one way to run plain commands per server: the only one, or each primary of a Cluster."""
        return [lambda *command, to=node: self._once(to, command) for node in self._nodes()]

    def _reached(self, took_s: float) -> None:
        now = self.clock.monotonic()
        if self.reachable_since is None or took_s > SLOW_S:
            self.reachable_since = now
        if now - self._synced > RESYNC_S:
            self._synced = now
            task = asyncio.ensure_future(self._resync())
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _missed(self) -> None:
        if self.reachable_since is not None:
            self.reachable_since = None
            self._lost_at = self.clock.monotonic()

    async def _once(self, client: Any, command: Sequence[Any]) -> Any:
        task = asyncio.ensure_future(self._execute(client, command))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _execute(self, client: Any, command: Sequence[Any]) -> Any:
        if client is self._blocking:
            return await client.execute_command(*command)
        async with self._gate:  # a Cluster's client fails, where a pool would wait
            return await client.execute_command(*command)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a waiter that left must not make the loop complain


class _Replicated:
    """Runs a command and WAITs for one replica on the same connection; a reply no replica has counts as lost.

    The scripts are idempotent, so the caller tries again; this narrows the failover window and does not close it.
    """

    def __init__(self, client: Any, key: str, *, cluster: bool) -> None:
        self._client, self._key, self._cluster = client, key, cluster

    async def execute_command(self, *command: Any) -> Any:
        if self._cluster:
            await self._client.initialize()
            node = self._client.get_node_from_key(self._key)
            connection = node.acquire_connection()
        else:
            connection = await self._client.connection_pool.get_connection()
        try:
            await connection.connect()
            await connection.send_command(*command)
            reply = await connection.read_response()
            await connection.send_command("WAIT", 1, 1000)
            replicas = await connection.read_response()
        finally:
            if self._cluster:
                node.release(connection)
            else:
                await self._client.connection_pool.release(connection)
        if replicas < 1:
            raise RedisConnectionError("NOREPLICAS: no replica acknowledged the write within 1 s")
        return reply
