"""Idle event streams of one waiting request, kept open beside a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from types import TracebackType
from typing import Self

import aiohttp
import redis.asyncio
from spillway_client import AsyncSpillway

from bench.mesh.local_mesh import LocalMesh
from common.ids import ulid

DIMENSION = 8
HELD_S = 300  # longer than any measurement beside it


class Streams:
    """`count` connections, each reading the events of one search that its stopped worker does not answer.

    At exit the worker goes on, the search ends, and `whole` says how many streams got its outcome to the end.
    """

    def __init__(self, mesh: LocalMesh, count: int) -> None:
        self._mesh = mesh
        self._count = count
        self._client = AsyncSpillway(mesh.url, timeout_s=HELD_S, max_retries=0)
        self._held: asyncio.Task[object] | None = None
        self._readers: list[asyncio.Task[bool]] = []
        self.whole = 0

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        with contextlib.suppress(Exception):
            await self._client.collections.create("idle", dimension=DIMENSION, model=None)
        await self._client.documents("idle").add([{"id": "a", "vector": [1.0] * DIMENSION}])
        query = [1.0] * DIMENSION
        await self._client.search("idle", vector=query)
        self._mesh.kill("vector_search", signal.SIGSTOP)
        self._held = asyncio.create_task(self._hold({"vector": query}))
        await asyncio.sleep(0.3)
        request = await self._request()
        host, _, port = self._mesh.url.removeprefix("http://").partition(":")
        opened = [asyncio.Event() for _ in range(self._count)]
        for event in opened:
            self._readers.append(asyncio.create_task(_follow(host, int(port), request, event)))
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            for event in opened:
                await event.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._mesh.kill("vector_search", signal.SIGCONT)
        done, late = await asyncio.wait(self._readers, timeout=60)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self.whole = sum(task.exception() is None and task.result() for task in done)
        if self._held is not None:
            await asyncio.gather(self._held, return_exceptions=True)
        await self._client.close()

    async def _hold(self, body: object) -> None:
        """Search by a job, whose outcome can be asked for: without a key it would be a call past Redis."""
        headers = {"Idempotency-Key": ulid(), "Spillway-Timeout": str(HELD_S)}
        async with (
            aiohttp.ClientSession(self._mesh.url) as http,
            http.post("/v1/collections/idle/search", json=body, headers=headers) as answer,
        ):
            await answer.read()

    async def _request(self) -> str:
        """Find the held search's id on the bus: its answer, which names it, is yet to come."""
        client = redis.asyncio.from_url(self._mesh.redis_url, decode_responses=True)
        try:
            async for key in client.scan_iter(match="{search/*:job:*"):
                if await client.hget(key, "state") in ("queued", "running"):
                    return str(key).partition(":job:")[2]
        finally:
            await client.aclose()
        raise RuntimeError("the search that should wait is not on the bus")


async def _follow(host: str, port: int, request: str, opened: asyncio.Event) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"GET /v1/requests/{request}/events HTTP/1.1\r\nHost: {host}\r\n\r\n"
        writer.write(head.encode())
        line = await reader.readline()
        opened.set()
        if b" 200 " not in line:
            return False
        text = b""
        while b"event: result" not in text[-4096:]:
            more = await reader.read(4096)
            if not more:
                return False
            text += more
        return True
    finally:
        writer.close()
