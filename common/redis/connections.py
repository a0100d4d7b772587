"""Connections to one Redis server: each command has one to itself until its reply has come, and is sent once.

redis-py's own pool costs as much per command as the command: events, measurements and a lock that are not used here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError


class ServerConnections:
    """As many connections as commands are in flight; the idle ones are used again.

    `make` returns a new connection of redis-py, not yet open; `timeout_s` and `connect_s` bound one reply and the
    opening of one connection. Errors are those of redis-py, and TimeoutError.
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
        """Return the replies of commands sent together on one connection; a refused one's is its ResponseError."""

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
            # There is something to read where nothing was asked: the server has closed the connection.
            if not connection.is_connected or await connection.can_read():
                await self._open(connection)
            async with asyncio.timeout(self._timeout_s):
                reply = await ask(connection)
        except ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            await connection.disconnect(
                nowait=True
            )  # the reply may still come, and is nobody else's
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
