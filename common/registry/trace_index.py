"""The moment from which all traces of a session are indexed; traces of older sessions are found by a scan of all keys.

Earlier versions wrote no indexes. Their dead letters, and their sessions by the time of their end, are indexed once;
after a kill the next start does it again. All their other traces have a time to live, after which no deletion scans any
more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from common import log
from common.bus import Bus, BusFull, keys
from common.ids import time_of, unique_of
from common.registry.dead_letters import DeadLetters
from common.registry.idempotency import CLAIM_S
from common.registry.sessions import Sessions

BEGUN, LETTERS, SESSIONS = "since", "letters", "sessions"
_ROWS = 200
OLD_MS = 1000 * (CLAIM_S + 3600)  # of an earlier version's traces a claim lives longest
_log = log.get("kv_store")


class TraceIndex:
    """The state of the indexes, in `{sessions/0}:index`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def begin(self) -> None:
        """Record that every process writes the indexes from now on; only the first call has an effect."""
        with contextlib.suppress(BusFull):  # then every deletion scans until the next start
            await self._bus.connection.call("HSETNX", keys.INDEX, BEGUN, self._bus.clock.now_ms())

    async def complete(self, sessions: Iterable[str]) -> bool:
        """Return whether the indexes name all traces of these sessions."""
        since, letters = await self._bus.connection.call("HMGET", keys.INDEX, BEGUN, LETTERS)
        if since is None or letters is None:
            return False
        gone = self._bus.clock.now_ms() >= int(since) + OLD_MS
        if gone and not int(letters):  # letters of stages never expire, and no list names them
            return True
        return all(time_of(unique_of(name)) >= int(since) for name in sessions)

    async def run(self) -> None:
        """Index the dead letters and sessions of earlier versions once. Raises BusDown and BusFull."""
        if await self._bus.connection.call("HGET", keys.INDEX, SESSIONS) is None:
            await self.index_sessions()
        if await self._bus.connection.call("HGET", keys.INDEX, LETTERS) is None:
            await self.index_letters()

    async def index_sessions(self) -> None:
        """Have the sweep check every session once, which also sets the time of the next check; then record that."""
        count = 0
        for family in await Sessions(self._bus).families():
            for tenant in await self._bus.connection.call("SMEMBERS", keys.tenants(family)):
                index, cursor = keys.sessions(family, tenant.decode()), b"0"
                while True:
                    cursor, flat = await self._bus.connection.call(
                        "ZSCAN", index, cursor, "COUNT", _ROWS
                    )
                    members = [part for name in flat[::2] for part in (0, tenant + b"/" + name)]
                    if members:
                        await self._bus.connection.call("ZADD", keys.due(family), "NX", *members)
                    count += len(members) // 2
                    if cursor in {b"0", 0}:
                        break
        await self._bus.connection.call("HSET", keys.INDEX, SESSIONS, count)
        _log.info("sessions_indexed", sessions=count)

    async def index_letters(self) -> None:
        """Index every family's dead letters; then record that."""
        stages = 0
        for family in await DeadLetters(self._bus).families():
            stages += await DeadLetters(self._bus).index(family)
        await self._bus.connection.call("HSET", keys.INDEX, LETTERS, stages)
        _log.info("letters_indexed", of_stages=stages)
