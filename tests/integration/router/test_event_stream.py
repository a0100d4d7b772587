"""When a stream of events is whole, and what its reader's leaving means before and after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from services.router.http.event_stream import copy, end, event_stream


class Streams:
    """A server of one stream, cancelled as by a reader that leaves after `leaves_after` of its two frames."""

    def __init__(self) -> None:
        self.leaves_after = 2
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.url = ""

    async def _frames(self, task: asyncio.Task[object]) -> AsyncGenerator[bytes, None]:
        for number, frame in enumerate((b"data: 1\n\n", b"data: [DONE]\n\n"), 1):
            yield frame
            if number == self.leaves_after:  # the frame is written
                asyncio.get_running_loop().call_soon(task.cancel)
                if number == 1:
                    await asyncio.Event().wait()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Stream, and note how that ended."""
        task = asyncio.current_task()
        assert task is not None
        response = event_stream("r")
        await response.prepare(request)
        try:
            await copy(self._frames(task), response)
            await end(response)
        except asyncio.CancelledError:
            self.outcome.set_result("left")
            raise
        self.outcome.set_result("whole")
        return response


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    """A running server."""
    made = Streams()
    app = web.Application()
    app.router.add_get("/", made.get)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = "http://{}:{}".format(*runner.addresses[0][:2])
    yield made
    await runner.cleanup()


@pytest.mark.parametrize(("leaves_after", "outcome"), [(1, "left"), (2, "whole")])
async def test_a_reader_that_has_everything_has_not_left(
    streams: Streams, leaves_after: int, outcome: str
) -> None:
    """A reader that leaves right after the last frame has the whole stream; one that leaves before it has left."""
    streams.leaves_after = leaves_after
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(streams.url) as response:
                await response.read()
        except aiohttp.ClientError:
            assert outcome == "left"

    assert await streams.outcome == outcome
