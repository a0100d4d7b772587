"""The policy of a server that one can do without: nobody waits for it for long, and for a while nobody asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from common.clock import Clock
from common.redis.breaker import CircuitBreaker
from common.redis.errors import RedisAway


class FailFastPolicy:
    """Tries a command once, for `timeout_s` in all, and none while the breaker is open.

    `name` is the server's in messages, and `down` makes the error of a caller that gets no answer.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        timeout_s: float,
        again_s: float,
        name: str,
        down: Callable[[str], Exception],
    ) -> None:
        self._timeout_s, self._name, self._down = timeout_s, name, down
        self.breaker = CircuitBreaker(clock, again_s=again_s, probe_s=timeout_s)

    async def run(self, attempt: Callable[[], Awaitable[Any]], timeout_s: float | None) -> Any:
        """Return the reply, or raise the error that `down` makes within `timeout_s`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._refuse_while_open()
        try:
            async with asyncio.timeout(limit_s):
                return await attempt()
        except RedisAway as error:
            raise self._down(f"{self._name} is away ({error})") from error
        except TimeoutError:
            raise self._down(f"{self._name} is busy: no reply within {limit_s:g} s") from None

    def admit(self) -> None:
        """Refuse while the breaker is open; the first command after that finds out for all others."""
        self._refuse_while_open()
        self.breaker.probe()

    def reached(self, took_s: float) -> None:  # noqa: ARG002 - a slow reply is a reply
        """Close the breaker."""
        self.breaker.close()

    def missed(self, why: str) -> None:
        """Open the breaker."""
        self.breaker.open(f"{self._name} is away ({why})")

    def _refuse_while_open(self) -> None:
        if self.breaker.refuses:
            raise self._down(self.breaker.why)
