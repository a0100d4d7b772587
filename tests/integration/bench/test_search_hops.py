"""Searches as V1 sends them: the lean client against real servers, and the hops of a search through a real mesh."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
from spillway_client import AsyncSpillway

from bench import search_hops
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.search_mesh import COLLECTION, SpillwayServer, documents, services
from bench.mesh.stamped import read
from bench.workloads.http_link import HttpError, HttpLinks, post


async def test_every_hop_of_a_search_is_marked(tmp_path: Path) -> None:
    """Searches one after another: each stage is marked in each, and its own row is what each query finds first."""
    rows = np.eye(32, 16, dtype=np.float32) + np.eye(32, 16, -16, dtype=np.float32) * 0.5
    files = {name: tmp_path / f"{name}.stamps" for name in ("router", "vector_search")}
    stamped = [
        dataclasses.replace(each, stamps=str(files[each.name])) if each.name in files else each
        for each in services()
    ]
    asked = []
    async with LocalMesh(tmp_path, stamped) as mesh, HttpLinks(mesh.url) as links:
        server = SpillwayServer(mesh, links)
        async with AsyncSpillway(mesh.url) as client:
            await client.collections.create(COLLECTION, dimension=16, metric="dot", model=None)
            await links.send(documents(mesh.url, rows, 0, [{"bucket": n} for n in range(32)]))
        for call in server.calls(rows[:16], 1, 16):
            sent = time.monotonic()
            answer = await server.send(call)
            asked.append((sent, time.monotonic()))
            assert server.ids(answer)[0][0] == len(asked) - 1
        (many,) = server.calls(rows[:16], 16, None)
        assert [ids[0] for ids in server.ids(await server.send(many))] == list(range(16))

    times = search_hops.measure(asked, read(files["router"]) | read(files["vector_search"]))

    assert {len(part) for part in times.values()} == {16}
    assert all(np.median(part) > 0 for part in times.values())


async def test_an_error_of_a_server_is_raised() -> None:
    """A status that is no success, and a closed connection, are errors with their reason."""

    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" /bad " in head:
            writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy")
            await writer.drain()
            await reader.read()  # until the client closes
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    async with server, HttpLinks(url) as links:
        with pytest.raises(HttpError, match="429 Too Many: busy"):
            await links.send(post(url, "/bad", b""))
        with pytest.raises(HttpError, match="closed"):
            await links.send(post(url, "/gone", b""))
    await asyncio.gather(*[each for each in served if each is not None])
