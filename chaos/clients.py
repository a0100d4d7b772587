"""Clients that never give up before their deadline: the SDK at every router, with failover between them.

Each operation carries one idempotency key over all its tries, so what a dead router began is found at another.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from spillway_client import (
    APIConnectionError,
    AsyncSpillway,
    RateLimitError,
    SpillwayError,
    UnavailableError,
)

from loadgen.chat.client import Chat

T = TypeVar("T")
Operation = Callable[[AsyncSpillway, str], Awaitable[T]]
_AGAIN = (APIConnectionError, UnavailableError, RateLimitError)


@dataclass(slots=True)
class Done:
    """One operation: when it was first sent and when it ended (monotonic), and how.

    `beats_s` are the moments at which a part of its answer came; `answered_s` is when all of it had, if something
    follows that takes long by itself. It is `pausing` while its client asks for nothing. `retrievals` are those that
    its client has been told of by now.
    """

    kind: str
    key: str
    sent_s: float
    done_s: float = 0.0
    tries: int = 0
    outcome: str = ""
    beats_s: list[float] = field(default_factory=list)
    answered_s: float = 0.0
    pausing: bool = False
    retrievals: list[dict[str, Any]] = field(default_factory=list)

    def silence_s(self, since: float) -> float:
        """Return the longest time after `since` in which its client heard nothing; it must have ended."""
        end = self.answered_s or self.done_s
        later = sorted(at for at in self.beats_s if since < at < end)
        moments = [max(since, self.sent_s), *later, max(since, end)]
        return max(after - before for before, after in itertools.pairwise(moments))


class Clients:
    """One SDK client a router, and a chat client of all; use as `async with Clients(urls) as clients`."""

    def __init__(self, urls: list[str], *, deadline_s: float = 90.0) -> None:
        self._clients = [
            AsyncSpillway(url, timeout_s=deadline_s, max_retries=0, resume_s=60.0) for url in urls
        ]
        self.chat = Chat(urls, resume_s=60.0, timeout_s=deadline_s)
        self._deadline_s = deadline_s
        self._turn = itertools.count()
        self.refused: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        for client in self._clients:
            await client.__aenter__()
        await self.chat.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.chat.__aexit__(kind, error, tb)
        for client in self._clients:
            await client.close()

    @property
    def repeated(self) -> Counter[str]:
        """Return what made an operation be tried again, and how often."""
        return self.refused + self.chat.broken

    @property
    def first(self) -> AsyncSpillway:
        """Return the client of the first router."""
        return self._clients[0]

    async def ask(self, operation: Operation[T], done: Done) -> T:
        """Run an operation until it is answered for good; what helps no retry, or the deadline, raises."""
        limit = time.monotonic() + self._deadline_s
        turn = next(self._turn)
        while True:
            client = self._clients[(turn + done.tries) % len(self._clients)]
            done.tries += 1
            try:
                return await operation(client, done.key)
            except _AGAIN as error:
                self.refused[name_of(error)] += 1
                wait = min(getattr(error, "retry_after_s", None) or 0.2, 2.0)
                if time.monotonic() + wait > limit:
                    raise
                await asyncio.sleep(wait)


def name_of(error: SpillwayError) -> str:
    """Return an error's code, or its class where it has none."""
    return str(getattr(error, "code", None) or type(error).__name__)
