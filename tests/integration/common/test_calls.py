"""Calls over framed TCP: a real server and real clients on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.transport.call_client import CallClient, CallFailed, CallLost
from common.transport.call_server import Call, CallServer
from common.transport.frames import CALL, HELLO, frame
from common.transport.own_address import own_address
from tests.support.waiting import until

WAIT_S = 10.0
ROUTES = Path("/proc/net/route")


class Echo:
    """A server that answers what the payload asks for, when it is told to."""

    def __init__(self) -> None:
        self.server = CallServer(self.take)
        self.held: list[Call] = []
        self.left_s: list[float] = []
        self.port = 0

    def take(self, call: Call) -> None:
        self.left_s.append(call.deadline - asyncio.get_running_loop().time())
        if call.payload.startswith(b"hold"):
            self.held.append(call)
        elif call.payload.startswith(b"fail"):
            call.fail(call.payload)
        else:
            call.reply(call.payload)

    async def client(self, token: str = "") -> CallClient:
        return await CallClient.open("127.0.0.1", self.port, token or self.server.token, WAIT_S)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    """A listening server."""
    made = Echo()
    _, made.port = await made.server.start("127.0.0.1", 0)
    yield made
    await made.server.close()


async def test_calls_are_answered_in_any_order(echo: Echo) -> None:
    """Many calls share a connection; each gets its own answer, of any size, whatever the order."""
    client = await echo.client()
    first = client.call(b"hold 0", 5000)
    payloads = [b"x" * size for size in (0, 1, 100_000, 3_000_000)]
    async with asyncio.timeout(WAIT_S):
        assert [await client.call(payload, 1000) for payload in payloads] == payloads
        with pytest.raises(CallFailed) as failed:
            await client.call(b"fail", 1000)
        assert failed.value.payload == b"fail"
        assert client.in_flight == 1
        echo.held[0].reply(b"late")
        assert await first == b"late"
    assert client.in_flight == 0
    assert 4.0 < echo.left_s[0] <= 5.0
    client.close()


async def test_who_does_not_know_the_token_is_not_served(echo: Echo) -> None:
    """A wrong token, no hello, and bytes that are no frames end the connection, and no other one."""
    good = await echo.client()
    with pytest.raises(CallLost):
        await echo.client("wrong")
    huge = frame(HELLO, 0, bytes(1_000_000))[:1000]  # refused by its head
    for sent in (frame(CALL, 1, b"hello"), b"GET / HTTP/1.1\r\n\r\n", huge):
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        writer.write(sent)
        told = b""
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):  # nothing is told to a stranger
                told = await reader.read()
        assert told == b""
        writer.close()
    assert len(echo.left_s) == 0
    assert await good.call(b"still here", 1000) == b"still here"
    good.close()


async def test_a_server_that_ends_fails_its_calls(echo: Echo) -> None:
    """Calls without an answer get CallLost, later calls too; a caller may leave before its answer comes."""
    client = await echo.client()
    left = client.call(b"hold and leave", 5000)
    waiting = client.call(b"hold", 5000)
    await until(lambda: len(echo.held) == 2)
    left.cancel()
    echo.held[0].reply(b"to nobody")
    assert await client.call(b"on", 1000) == b"on"
    await echo.server.close()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(CallLost):
            await waiting
    assert not client.usable
    with pytest.raises(CallLost):
        client.call(b"more", 1000)
    with pytest.raises(ConnectionRefusedError):
        await echo.client()


async def test_a_call_ends_at_its_deadline(echo: Echo) -> None:
    """Calls that are not answered in time end in any order of deadlines, and count until they are answered."""
    client = await echo.client()
    async with asyncio.timeout(WAIT_S):
        calls = [client.call(b"hold", left_ms) for left_ms in (60_000, 40, 20, -5)]
        for late in calls[1:]:
            with pytest.raises(TimeoutError):
                await late
        assert client.in_flight == 4
        with pytest.raises(TimeoutError):
            await client.call(b"hold", 10)
        for held in echo.held:
            held.reply(b"at last")
        assert await calls[0] == b"at last"
        await until(lambda: client.in_flight == 0)
    client.close()


async def test_frames_of_one_turn_arrive_in_order(echo: Echo) -> None:
    """Calls and answers that are written together are taken one by one, as they were written."""
    client = await echo.client()
    payloads = [b"%d" % number * (number * 997) for number in range(60)]
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*[client.call(payload, 5000) for payload in payloads])
    assert answers == payloads
    client.close()


async def test_a_wildcard_is_reached_at_the_own_address() -> None:
    """What a server on every address publishes reaches it, and is no loopback where there is a way out."""
    echo = Echo()
    _, port = await echo.server.start("0.0.0.0", 0)
    client = await CallClient.open(own_address(), port, echo.server.token, WAIT_S)
    answer = await client.call(b"hello", 10_000)
    client.close()
    await echo.server.close()

    assert answer == b"hello"
    routes = await asyncio.to_thread(ROUTES.read_text)
    if any(line.split()[1] == "00000000" for line in routes.splitlines()):  # the default one
        assert not ipaddress.ip_address(own_address()).is_loopback
