"""Requests in progress and open streams: counted, and awaited or ended when the router drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from services.router import metrics


class ActiveRequests:
    """The number of requests whose response is not yet written; a request is counted within `with active:`."""

    def __init__(self) -> None:
        self.count = 0
        self._quiet = asyncio.Event()

    def __enter__(self) -> None:
        self.count += 1
        self._quiet.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if self.count == 0:
            self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no request is in progress."""
        if self.count:
            await self._quiet.wait()


class OpenStreams:
    """The open streams of generations, which a stopping router ends."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def open(self) -> Iterator[asyncio.Timeout]:
        """Count a stream within the block, and yield the timeout that `end_all` lets expire."""
        limit = asyncio.timeout(None)
        self._limits.add(limit)
        metrics.STREAMS.set(len(self._limits))
        try:
            yield limit
        finally:
            self._limits.discard(limit)
            metrics.STREAMS.set(len(self._limits))

    def end_all(self) -> None:
        """End every open stream with an error from which its client resumes at another router."""
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            with contextlib.suppress(RuntimeError):  # the timeout is not entered yet, or exiting
                limit.reschedule(now)
