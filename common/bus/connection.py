"""Connection of a process to the bus' Redis: plain commands and scripts, tried again until Redis is back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from common import log
from common.bus import keys as names
from common.bus import metrics
from common.bus.scripts import Scripts
from common.clock import SystemClock
from common.config import Common
from common.errors import Unavailable
from common.redis.address import RedisAddress
from common.redis.client import RedisClient, Work
from common.redis.persist import PersistPolicy
from common.tasks import cancel

BLOCK_MS = 1000
CONNECTIONS = 64
TIMEOUT_S = 5.0  # seconds for a reply; a blocking read has BLOCK_MS more
RESYNC_S = 5.0
_CLOSE_S = 4.0  # shorter than TIMEOUT_S, so that late commands end with an error of the closing
_log = log.get("bus")


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


def _down(why: str) -> BusDown:
    return BusDown(f"the bus is away ({why})", retry_after_s=2)


class Connection:
    """Runs commands and scripts on one Redis or one Cluster; `policy` knows for how long Redis has been reached."""

    def __init__(self, config: Common, clock: SystemClock) -> None:
        self.config = config
        self.clock = clock
        self.cluster = config.redis_cluster
        self.url = redis_url(config)
        self.address = RedisAddress(self.url, self.cluster, "SPILLWAY_REDIS_URL")
        self._scripts = Scripts()
        self._claims = False
        self.policy = PersistPolicy(clock, down=_down)
        self._commands = self._client(TIMEOUT_S, CONNECTIONS, self._answered)
        self._blocking = self._client(BLOCK_MS / 1000 + TIMEOUT_S, 0, self._resync_when_due)
        self._resyncs: set[asyncio.Task[None]] = set()
        self._synced = clock.monotonic()

    def _client(
        self, timeout_s: float, connections: int, answered: Callable[[float], None]
    ) -> RedisClient:
        return RedisClient(
            self.address,
            self.policy,
            self.clock,
            timeout_s=timeout_s,
            connections=connections,
            answered=answered,
        )

    @property
    def in_flight(self) -> int:
        """Number of commands without a reply yet, commands whose callers have left included."""
        return self._commands.in_flight + self._blocking.in_flight

    @property
    def reachable(self) -> bool:
        """True if the last command reached Redis."""
        return self.policy.reachable_since is not None

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Wait until Redis answers and measure the offset to its clock; BusDown after `timeout_s`."""
        seconds, micros = await self.call("TIME", timeout_s=timeout_s)
        self._adopt(int(seconds) * 1000 + int(micros) // 1000)

    def _adopt(self, redis_ms: int) -> None:
        self.clock.offset_ms += redis_ms - self.clock.now_ms()

    async def _resync(self) -> None:
        """Measure the offset of the clocks again, since either clock may step, and renew the claim of the scripts."""
        with contextlib.suppress(BusDown, BusFull):
            await self.connect(timeout_s=1.0)
            if self._claims and (other := await self._scripts.claim(self.call)):
                _log.error("bus_scripts_mixed", ours=self._scripts.version, theirs=other)

    async def claim_scripts(self) -> None:
        """Publish from now on this process' version of the scripts; MixedScripts while other processes use another."""
        other = None
        with contextlib.suppress(BusFull):  # on a full Redis accepted work must still be finished
            other = await self._scripts.claim(self.call)
        if other is not None:
            raise MixedScripts(
                f"processes of another version use this Redis (scripts {other}, "
                f"ours are {self._scripts.version}); stop them"
            )
        self._claims = True

    async def close(self) -> None:
        """Let commands in flight end, then close every connection."""
        await cancel(*self._resyncs)
        for client in (self._commands, self._blocking):
            await client.close(_CLOSE_S)

    async def call(self, *command: Any, timeout_s: float = 10.0) -> Any:
        """Run one command; while Redis is away it is retried with backoff, and after `timeout_s` raises BusDown."""
        return await self._run(
            self._commands, lambda redis: redis.execute_command(*command), timeout_s
        )

    async def blocking(self, *command: Any) -> Any:
        """Run one blocking read, once, on a connection of its own; BusDown if the connection is lost."""
        return await self._run(self._blocking, lambda redis: redis.execute_command(*command), 0.0)

    async def script(
        self, name: str, keys: Sequence[str], args: Sequence[Any], *, timeout_s: float = 10.0
    ) -> Any:
        """Run a script of the bus by its name; the script is loaded if Redis does not know it."""
        wait = self.config.durability == "replicated" and name in {"admit", "finish"}

        async def call(*command: Any) -> Any:
            async def work(redis: Any) -> Any:
                if not wait:
                    return await redis.execute_command(*command)
                return await _acknowledged(redis, command, keys[0], cluster=self.cluster)

            return await self._run(self._commands, work, timeout_s)

        return await self._scripts.run(call, name, keys, args)

    async def probe(self, timeout_s: float) -> None:
        """Check that Redis answers a cheap command; BusDown otherwise. The command has a key, as a Cluster needs."""
        await self.call("EXISTS", names.MODELS, timeout_s=timeout_s)

    async def memory(self) -> tuple[int, int]:
        """Return the bytes that Redis uses and its limit (0: none); for a Cluster, those of its fullest node."""
        used, limit = 0, 0
        for call in self.callers():
            lines = (await call("INFO", "memory")).decode().splitlines()
            info = dict(line.split(":", 1) for line in lines if ":" in line)
            one, most = int(info["used_memory"]), int(info["maxmemory"])
            if one * max(limit, 1) >= used * max(most, 1):
                used, limit = one, most
        return used, limit

    def callers(self) -> list[Callable[..., Awaitable[Any]]]:
        """Return one function per server that runs a plain command there: one for each primary of a Cluster.

        A command is tried once; BusDown if that fails.
        """
        return self._commands.callers(timeout_s=0.0)

    async def _run(self, client: RedisClient, work: Work, timeout_s: float) -> Any:
        try:
            return await client.run(work, timeout_s)
        except OutOfMemoryError as error:
            raise BusFull(
                "the bus is full; running work goes on, try again later", retry_after_s=5
            ) from error

    def _answered(self, took_s: float) -> None:
        metrics.CALL_SECONDS.observe(took_s)
        self._resync_when_due(took_s)

    def _resync_when_due(self, _took_s: float) -> None:
        now = self.clock.monotonic()
        if now - self._synced > RESYNC_S:
            self._synced = now
            task = asyncio.ensure_future(self._resync())
            self._resyncs.add(task)
            task.add_done_callback(self._resyncs.discard)


async def _acknowledged(redis: Any, command: Sequence[Any], key: str, *, cluster: bool) -> Any:
    """Run a command and WAIT for one replica on the same connection; without a replica the reply counts as lost.

    The scripts are idempotent, so the caller tries again. This narrows the failover window and does not close it.
    """
    wait = ("WAIT", 1, 1000)
    if cluster:
        node = redis.get_node_from_key(key)
        connection = node.acquire_connection()
        try:
            await connection.connect()
            await connection.send_command(*command)
            reply = await connection.read_response()
            await connection.send_command(*wait)
            replicas = await connection.read_response()
        finally:
            node.release(connection)
    else:
        reply, replicas = await redis.pipeline([command, wait])
        if isinstance(reply, Exception):
            raise reply
    if replicas < 1:
        raise RedisConnectionError("NOREPLICAS: no replica acknowledged the write within 1 s")
    return reply
