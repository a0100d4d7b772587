"""One process' connections to one server or Cluster; a policy decides how an error ends.

A cancelled command would leave redis-py's later replies off by one, so every command runs to its end in a task of its
own, even after its caller has left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from common.clock import Clock
from common.redis.address import RedisAddress
from common.redis.errors import RedisAway, RedisClosed, is_away, is_full

CONNECT_S = 3.0
Command = Sequence[Any]
Work = Callable[[Any], Awaitable[Any]]  # one round trip; the argument is redis-py's client


class RedisPolicy(Protocol):
    """Decides whether a command is tried, and tried again, and which error its caller gets."""

    async def run(self, attempt: Callable[[], Awaitable[Any]], timeout_s: float | None) -> Any:
        """Return the reply of `attempt`, which may raise RedisAway; None means the policy's own timeout."""
        ...

    def admit(self) -> None:
        """Raise the caller's error if no command may be sent now; called just before a command is sent."""
        ...

    def reached(self, took_s: float) -> None:
        """Record that the server has answered or refused a command, `took_s` after the caller asked."""
        ...

    def missed(self, why: str) -> None:
        """Record that the server is away."""
        ...


class RedisClient:
    """Runs commands under one policy, at most `connections` at once (0: any number, each on its own connection).

    `timeout_s` bounds the wait for one reply, `connect_s` the opening of one connection; `answered` is called with the
    seconds that each reply took.
    """

    def __init__(
        self,
        address: RedisAddress,
        policy: RedisPolicy,
        clock: Clock,
        *,
        timeout_s: float,
        connections: int,
        connect_s: float = CONNECT_S,
        answered: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.cluster = address.cluster
        self._policy, self._clock = policy, clock
        self._redis = address.client(
            timeout_s=timeout_s,
            connect_s=connect_s,
            connections=2 * connections or 100_000,  # of a Cluster's node
        )
        self._values = address.values(timeout_s=timeout_s, connect_s=connect_s)
        # A Cluster's client raises an error when all its connections are in use, so commands wait here.
        self._gate: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(connections) if connections else contextlib.nullcontext()
        )
        self._answered = answered
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Number of commands without a reply yet, commands whose callers have left included."""
        return len(self._tasks)

    async def call(self, *command: Any, timeout_s: float | None = None) -> Any:
        """Run one command; OutOfMemoryError if the server is full, ResponseError if it refuses for another reason."""
        return await self.run(lambda redis: redis.execute_command(*command), timeout_s)

    async def run(self, work: Work, timeout_s: float | None = None) -> Any:
        """Run one round trip of any kind, as `call` does."""
        return await self._policy.run(lambda: self._attempt(work), timeout_s)

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to commands in one round trip a node, in order; a ResponseError for a refused one."""
        if not commands:
            return []

        async def work(redis: Any) -> list[Any]:
            asked = _of_cluster(redis, commands) if self.cluster else redis.pipeline(commands)
            return self._checked(await asked)

        replies: list[Any] = await self.run(work)
        return replies

    async def values(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands without arrays as replies, as `pipeline` does; large values are bytearrays, not copied."""
        values = self._values
        if values is None or not commands:
            return await self.pipeline(commands)

        async def work(_redis: Any) -> list[Any]:
            return self._checked(await values.ask(commands))

        replies: list[Any] = await self.run(work)
        return replies

    def _checked(self, replies: list[Any]) -> list[Any]:
        for reply in replies:
            if isinstance(reply, Exception) and is_away(reply, cluster=self.cluster):
                raise reply
        return replies

    def callers(self, timeout_s: float | None = None) -> list[Callable[..., Awaitable[Any]]]:
        """Return a function per server that runs plain commands: for the only server, or each primary of a Cluster.

        A Cluster's primaries are known after the first command.
        """

        def caller(node: Any) -> Callable[..., Awaitable[Any]]:
            async def call(*command: Any) -> Any:
                return await self.run(lambda _: node.execute_command(*command), timeout_s)

            return call

        return [caller(n) for n in (self._redis.get_primaries() if self.cluster else [self._redis])]

    async def close(self, grace_s: float) -> None:
        """Let commands in flight end for `grace_s`, end the rest with RedisClosed, and close every connection."""
        self._closed = True
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=grace_s)
            for task in left:  # else a Cluster's client opens new connections for these
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._values is not None:
            self._values.close()
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    # -- one try ---------------------------------------------------------------------------------------

    async def _attempt(self, work: Work) -> Any:
        if self._closed:
            raise RedisClosed("the connection was closed")
        task = asyncio.ensure_future(self._execute(work, self._clock.monotonic()))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
        # The command was cancelled, by `close` or within redis-py, and its caller was not.
        if self._closed:
            raise RedisClosed("the connection was closed")
        self._policy.missed("the command was cancelled with its connection")
        raise RedisAway("the command was cancelled with its connection")

    async def _execute(self, work: Work, began: float) -> Any:
        async with self._gate:
            self._policy.admit()
            try:
                if self.cluster:  # before it knows the nodes, commands go to any node
                    await self._redis.initialize()
                reply = await work(self._redis)
            except Exception as error:
                raise self._judged(error, began) from error
            took_s = self._clock.monotonic() - began
            self._policy.reached(took_s)
            self._answered(took_s)
            return reply

    def _judged(self, error: Exception, began: float) -> Exception:
        if is_away(error, cluster=self.cluster):
            why = f"{type(error).__name__}: {error}"
            self._policy.missed(why)
            return RedisAway(why)
        if isinstance(error, ResponseError):
            self._policy.reached(self._clock.monotonic() - began)
            if is_full(error) and not isinstance(error, OutOfMemoryError):
                return OutOfMemoryError(str(error))
        return error

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read the error: asyncio logs errors that no one reads


async def _of_cluster(redis: Any, commands: Sequence[Command]) -> list[Any]:
    pipe = redis.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    return replies
