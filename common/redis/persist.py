"""The policy of the bus: commands are tried again until Redis is back, and the time without Redis is measured."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from common.clock import Clock
from common.redis.errors import RedisAway, RedisClosed

PATIENCE_S = 10.0
SLOW_S = 3.0  # a reply slower than this may mean that heartbeats lapsed while Redis stood still
_FIRST_S, _LONGEST_S = 0.02, 1.0


class PersistPolicy:
    """Tries commands again with backoff; `reachable_since` is by `clock.monotonic()`, None while Redis is away.

    `down` makes the error of a caller whose timeout has passed.
    """

    def __init__(self, clock: Clock, *, down: Callable[[str], Exception]) -> None:
        self._clock, self._down = clock, down
        self.reachable_since: float | None = None
        self._lost_at = clock.monotonic()

    async def run(self, attempt: Callable[[], Awaitable[Any]], timeout_s: float | None) -> Any:
        """Return the reply; after tries for `timeout_s` (0: one try) raise the error that `down` makes."""
        patience_s = PATIENCE_S if timeout_s is None else timeout_s
        deadline, pause = self._clock.monotonic() + patience_s, _FIRST_S
        while True:
            try:
                return await attempt()
            except RedisAway as error:
                left = deadline - self._clock.monotonic()
                if left <= 0 or isinstance(error, RedisClosed):
                    raise self._down(str(error)) from error
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left))
            pause = min(pause * 2, _LONGEST_S)

    def admit(self) -> None:
        """Allow every command."""

    def reached(self, took_s: float) -> None:
        """Restart `reached_for` at 0 if Redis was away, or so slow that it may have stood still."""
        if self.reachable_since is None or took_s > SLOW_S:
            self.reachable_since = self._clock.monotonic()

    def missed(self, why: str) -> None:  # noqa: ARG002 - the caller's error has the reason
        """Begin to measure how long Redis is away."""
        if self.reachable_since is not None:
            self.reachable_since = None
            self._lost_at = self._clock.monotonic()

    def suspect(self) -> None:
        """Restart `reached_for` at 0, since Redis or this machine may have stood still."""
        if self.reachable_since is not None:
            self.reachable_since = self._clock.monotonic()

    def down_s(self) -> float:
        """The seconds since Redis became unreachable; 0.0 if it is reachable."""
        return 0.0 if self.reachable_since is not None else self._clock.monotonic() - self._lost_at

    def reached_for(self) -> float:
        """The seconds for which Redis has been reachable without a break."""
        since = self.reachable_since
        return 0.0 if since is None else self._clock.monotonic() - since
