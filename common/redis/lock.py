"""A lock in Redis that one process at a time holds, as long as it renews the lock; only the owner deletes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from common.clock import Clock
from common.redis.scripts import ScriptSet

Acquired = Literal["taken", "renewed", "other"]
_ACQUIRED: tuple[Acquired, ...] = ("other", "renewed", "taken")  # by the script's number
_SCRIPTS = ScriptSet.read(Path(__file__).parent / "lua", ("acquire", "release"))


class RedisLock:
    """One process' hold on the lock `key`, which lapses `life_ms` after it was last renewed.

    `call` runs one command on the server that has the key; `owner` must be this process' own name. A full server gives
    the lock, too, since its owner's work may free memory.
    """

    def __init__(
        self, call: Callable[..., Awaitable[Any]], key: str, owner: str, life_ms: int, clock: Clock
    ) -> None:
        self._call, self._key, self._owner, self._life_ms = call, key, owner, life_ms
        self._clock = clock
        self._until_s: float | None = None

    @property
    def held(self) -> bool:
        """True while no other process can have the lock: until `life_ms` after the last successful call began."""
        return self._until_s is not None and self._clock.monotonic() < self._until_s

    async def acquire(self) -> Acquired:
        """Take a free lock ("taken") or renew this process' own ("renewed"); "other" if another owner has it.

        Errors of `call` pass through; after one the lock is this process' only while `held` is True.
        """
        asked_s = self._clock.monotonic()
        got = _ACQUIRED[await self._run("acquire", self._owner, self._life_ms)]
        self._until_s = None if got == "other" else asked_s + self._life_ms / 1000
        return got

    async def release(self) -> bool:
        """Delete the lock if this process has it; return whether it did."""
        self._until_s = None
        return bool(await self._run("release", self._owner))

    async def _run(self, name: str, *args: Any) -> int:
        reply: int = await _SCRIPTS.run(self._call, name, (self._key,), args)
        return reply
