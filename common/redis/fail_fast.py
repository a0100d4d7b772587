"""The policy of a server that is not essential: short waits, and no commands for a while after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from common.clock import Clock
from common.redis.breaker import CircuitBreaker
from common.redis.errors import RedisAway


class FailFastPolicy:
    """Tries a command once, for at most `timeout_s`, and sends no command while the breaker is open.

    `name` is the server's name in messages; `down` makes the error of a caller that gets no answer.
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
        """Return the reply within `timeout_s`, or raise the error that `down` makes."""
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
        """Raise `down`'s error while the breaker is open; the first command after that is the try for all."""
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
