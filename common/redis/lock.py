"""A lock in Redis that one process at a time has, for as long as it renews it; only its owner deletes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from common.clock import Clock
from common.redis.scripts import ScriptSet

Acquired = Literal["taken", "renewed", "other"]
_ACQUIRED: tuple[Acquired, ...] = ("other", "renewed", "taken")  # by what the script returns
_SCRIPTS = ScriptSet.read(Path(__file__).parent / "lua", ("acquire", "release"))


class RedisLock:
    """One process' hold on the lock `key`, which lapses `life_ms` after it was last renewed.

    `call` runs one command on the server that has the key; `owner` must be this process' alone. A full server gives
    the lock as well: what the owner does may be what makes room.
    """

    def __init__(
        self, call: Callable[..., Awaitable[Any]], key: str, owner: str, life_ms: int, clock: Clock
    ) -> None:
        self._call, self._key, self._owner, self._life_ms = call, key, owner, life_ms
        self._clock = clock
        self._until_s: float | None = None

    @property
    def held(self) -> bool:
        """True while nobody else can have it: from a success until its life after that call began."""
        return self._until_s is not None and self._clock.monotonic() < self._until_s

    async def acquire(self) -> Acquired:
        """Take the lock if nobody has it, renew it if it is ours; return which, or that another has it.

        Raises what `call` raises; then it is ours only for as long as `held` says.
        """
        asked_s = self._clock.monotonic()
        got = _ACQUIRED[await self._run("acquire", self._owner, self._life_ms)]
        self._until_s = None if got == "other" else asked_s + self._life_ms / 1000
        return got

    async def release(self) -> bool:
        """Delete the lock if it is ours; return whether it was."""
        self._until_s = None
        return bool(await self._run("release", self._owner))

    async def _run(self, name: str, *args: Any) -> int:
        reply: int = await _SCRIPTS.run(self._call, name, (self._key,), args)
        return reply
