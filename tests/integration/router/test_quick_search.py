"""Searches past aiohttp say what those through it say, whatever a connection carries beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.http.connection import ClientConnection, note_requests
from services.router.http.whole_reply import WholeReply, one_piece
from tests.integration.router.test_collections import call
from tests.integration.router.test_shard_reads import Calls, collection, points
from tests.support.mesh import Mesh
from tests.support.waiting import until

WAIT_S = 20.0


class Echo:
    """Answers requests whose heads it has learned with their bodies in capitals, a moment later; every third not."""

    def __init__(self) -> None:
        self.heads: dict[bytes, int] = {}
        self.taken = self.left = 0
        self.stalls = False

    def learn(self, head: bytes, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Take note of a request that was answered in one piece."""
        if isinstance(response, WholeReply) and response.sent_whole:
            self.heads[head] = request.content_length or 0

    def begin(
        self, data: bytes, answered: Callable[[bytes | None], None]
    ) -> asyncio.Future[bytes] | None:
        """Answer in two turns of the loop."""
        end = data.find(b"\r\n\r\n") + 4
        if self.heads.get(data[:end]) != len(data) - end:
            return None
        self.taken += 1
        reply = one_piece(200, "OK", (), data[end:].upper()) if self.taken % 3 else None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bytes] = loop.create_future()
        done.add_done_callback(lambda it: self._end(it, reply, answered))
        if not self.stalls:
            loop.call_soon(loop.call_soon, self._finish, done)
        return done

    def _finish(self, done: asyncio.Future[bytes]) -> None:
        if not done.done():
            done.set_result(b"")

    def _end(
        self,
        done: asyncio.Future[bytes],
        reply: bytes | None,
        answered: Callable[[bytes | None], None],
    ) -> None:
        if done.cancelled():
            self.left += 1
        else:
            answered(reply)


async def _handled(request: web.BaseRequest) -> web.StreamResponse:
    body = (await request.read()).upper()
    return WholeReply(body) if request.method == "POST" else web.Response(body=b"GOT")


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Echo, tuple[str, int]]]:
    """A server of connections with an Echo; yields it and the address."""
    quick, site, loop = Echo(), web.Server(_handled), asyncio.get_running_loop()
    note_requests(site)
    listener = await loop.create_server(
        lambda: ClientConnection(site, 10, WAIT_S, quick, loop=loop), "127.0.0.1", 0
    )
    yield quick, listener.sockets[0].getsockname()[:2]
    listener.close()
    await site.shutdown(0.1)


def post(body: bytes, extra: str = "") -> bytes:
    head = f"POST / HTTP/1.1\r\nHost: here\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def replies(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """Read so many replies; return their bodies."""
    found = []
    async with asyncio.timeout(WAIT_S):
        for _ in range(count):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            found.append(await reader.readexactly(size))
    return found


GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nxy\r\n0\r\n\r\n"
KINDS = {
    "known": (post(b"abc"), b"ABC"),
    "other": (post(b"abcd"), b"ABCD"),
    "headers": (post(b"abc", "X-Some: thing\r\n"), b"ABC"),
    "empty": (post(b""), b""),
    "get": (GET, b"GOT"),
    "chunked": (CHUNKED, b"XY"),
}


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12),
    st.lists(st.integers(1, 120), max_size=12),
)
async def test_each_request_has_its_reply_in_its_place(kinds: list[str], cuts: list[int]) -> None:
    """Requests of all kinds, one behind the other, cut anywhere: the replies are theirs, in order."""
    sent = b"".join(KINDS[kind][0] for kind in kinds)
    async with echo() as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(post(b"abc"))
            assert await replies(reader, 1) == [b"ABC"]
        for cut in cuts:
            writer.write(sent[:cut])
            sent = sent[cut:]
            await asyncio.sleep(0)
        writer.write(sent)
        assert await replies(reader, len(kinds)) == [KINDS[kind][1] for kind in kinds]
        writer.close()


async def test_what_follows_one_request_is_quick_again() -> None:
    """Heads are known after their first request, on every connection, and after requests of other kinds, too."""
    async with echo() as (quick, address):
        for turn in range(4):
            reader, writer = await asyncio.open_connection(*address)
            for kind in ("known", "get", "known", "other", "known"):
                writer.write(KINDS[kind][0])
                assert await replies(reader, 1) == [KINDS[kind][1]]
            writer.close()
            assert quick.taken == (2 if turn == 0 else 2 + 4 * turn)


async def test_much_that_comes_behind_a_search_waits_for_it() -> None:
    """More than a connection holds is left with the client, and is answered in the end."""
    async with echo() as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post(b"abc"))
        await replies(reader, 1)
        large = b"x" * 300_000
        writer.write(post(b"abc"))
        writer.write(post(large))
        writer.write(post(b"abc"))
        assert await replies(reader, 3) == [b"ABC", large.upper(), b"ABC"]
        writer.close()


async def test_a_client_that_leaves_takes_its_search_with_it() -> None:
    """The search is cancelled."""
    async with echo() as (quick, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post(b"abc"))
        assert await replies(reader, 1) == [b"ABC"]
        quick.stalls = True
        writer.write(post(b"abc"))
        await until(lambda: quick.taken == 1, "a search")
        writer.close()
        await until(lambda: quick.left == 1, "its end")


# -- through the mesh


class Link:
    """One raw connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, mesh: Mesh) -> Link:
        where = urlsplit(mesh.url)
        return cls(*await asyncio.open_connection(where.hostname, where.port))

    async def ask(self, path: str, body: bytes, extra: str = "") -> tuple[list[bytes], Any]:
        """Send a search; return the head of the reply, without what differs from one to the next, and its JSON."""
        head = f"POST {path}/search HTTP/1.1\r\nHost: here\r\n{extra}Content-Length: {len(body)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(WAIT_S):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            sizes = [line for line in lines if line.startswith(b"Content-Length: ")]
            found = json.loads(await self._reader.readexactly(int(sizes[0][16:])))
        ids = [line[14:].decode() for line in lines if line.startswith(b"x-request-id: ")]
        assert len(ids) == 1
        if "request_id" in found:
            assert found.pop("request_id") == ids[0]
        found.get("search", {}).pop("took_ms", None)
        names = (b"Date: ", b"Content-Length: ", b"x-request-id: ")
        return [line for line in lines if not line.startswith(names)], found

    def close(self) -> None:
        self._writer.close()


async def test_both_ways_say_the_same(http: aiohttp.ClientSession, mesh: Mesh) -> None:
    """Searches of every kind, and faulty ones: by a head that is known, and by one that is new each time."""
    calls = Calls(mesh)
    one, two = (row.tolist() for row in points(2))
    bodies: list[Any] = [
        {"vector": one, "k": 3},
        {"vectors": [one, two], "k": 2, "include_text": False},
        {"vector": one, "k": 3, "filter": {"n": {"$lt": 9}}, "min_score": -1},
        {"vector": one, "k": 3, "exact": True},
        {"vector": one, "k": 3, "include_scores": True},
        {"vector": one, "k": 3, "mmr": {"lambda": 0.5}},
        {"vector": one, "k": 3, "time_budget_ms": 500},
        {"vector": one, "k": 3, "partial": True},
        {"text": "words", "k": 3, "mode": "text"},
        {"text": "words", "k": 3},
        {"vector": one[:-1], "k": 3},
        {"vector": one, "k": 0},
        {"vector": one, "k": 3, "effort": 5, "exact": True},
        {"vector": one, "k": 3, "filter": {"$nonsense": 1}},
        {"vector": one, "k": 3, "after": "no entry"},
        {"vector": one, "unknown": 1},
        [],
    ]
    async with collection(http, "quick") as path:
        await calls.search(http, path, bodies[0])
        link, turn = await Link.open(mesh), 0
        known = [json.dumps(body).encode() for body in bodies]
        for _ in range(2):
            for raw in known:
                turn += 1
                head, found = await link.ask(path, raw)
                other = await link.ask(path, raw, f"X-Turn: {turn}\r\n")
                if b'"time_budget_ms"' not in raw:
                    assert (head, found) == other
        before = await calls.count(http)
        for _ in range(5):
            assert (await link.ask(path, known[0]))[0][0] == b"HTTP/1.1 200 OK"
        assert await calls.count(http) == before + 5
        assert (await link.ask(path, known[0], "Spillway-Timeout: 0.001\r\n"))[1]
        link.close()
    assert (await call(http, "POST", f"{path}/search", bodies[0]))[0] == 404
