"""Connections to one Redis server: a command has a connection to itself until its reply, and is sent once.

redis-py's own pool takes as long per command as the command itself, for events, measurements and a lock that are not
needed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError


class ServerConnections:
    """A pool of connections: one for each command in flight; idle connections are used again.

    `make` returns a new connection of redis-py, not yet open; `timeout_s` bounds the wait for one reply, `connect_s`
    the opening of one connection. Errors are those of redis-py, and TimeoutError.
    """

    def __init__(self, make: Callable[[], Any], *, timeout_s: float, connect_s: float) -> None:
        self._make, self._timeout_s, self._connect_s = make, timeout_s, connect_s
        self._idle: list[Any] = []

    async def execute_command(self, *command: Any) -> Any:
        """Return the raw reply of one command; ResponseError if the server refuses it."""

        async def ask(connection: Any) -> Any:
            await connection.send_command(*command)
            return await connection.read_response()

        return await self._on_one(ask)

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the replies of commands sent together on one connection; a refused command's is its ResponseError."""

        async def ask(connection: Any) -> list[Any]:
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await _reply_or_refusal(connection) for _ in commands]

        replies: list[Any] = await self._on_one(ask)
        return replies

    async def aclose(self) -> None:
        """Close every idle connection."""
        while self._idle:
            await self._idle.pop().disconnect()

    async def _on_one(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        connection = self._idle.pop() if self._idle else self._make()
        try:
            # A connection that can be read before a command was sent was closed by the server.
            if not connection.is_connected or await connection.can_read():
                await self._open(connection)
            async with asyncio.timeout(self._timeout_s):
                reply = await ask(connection)
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            await connection.disconnect(nowait=True)  # no later command may read its reply
            raise
        self._idle.append(connection)
        return reply

    async def _open(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        async with asyncio.timeout(self._connect_s):
            await connection.connect()


async def _reply_or_refusal(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
