"""Turns over HTTP, a router and two generators: they go where their pages are, sessions and plain messages alike."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.bus import Bus, keys
from common.bus.workers import FRESH_S
from common.clock import SystemClock
from common.config import Common
from common.ids import Family
from tests.support.mesh import Mesh, Process
from tests.support.servers import Server

SIM = ("--device", "sim", "--embed-model", "none", "--chat-model", "sim", "--threads", "1")
WORDS = "the same long beginning of every message, which fills some pages; " * 8


class Two:
    """Valkey, one router, and two sim generators."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="spillway-two-"))
        self.redis = Server("valkey").start()
        started: list[tuple[str, ...]] = [("router", "0", "--port", "0", "--drain-s", "3")]
        started += [("gpu_worker", name, "--beta", "0.0001", *SIM) for name in ("a", "b")]
        self.processes = [
            Process(service, self.directory, self.redis.url, name, *flags).start()
            for service, name, *flags in started
        ]
        self.url = Mesh.address(self.processes[0])
        for process in self.processes:
            process.ports()
        Mesh.wait_ready(self.url)
        Mesh.wait_model(self.url, "generate")

    def close(self) -> None:
        """End everything."""
        for process in self.processes:
            process.stop()
        self.redis.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def two() -> Iterator[Two]:
    """A mesh of two generators."""
    made = Two()
    yield made
    made.close()


@pytest.fixture
async def bus(two: Two) -> AsyncIterator[Bus]:
    """The mesh's bus."""
    config = Common(data_dir=str(two.directory), redis_url=two.redis.url)
    opened = await Bus.open(config, SystemClock())
    yield opened
    await opened.close()


async def test_turns_go_where_their_pages_are(two: Two, bus: Bus) -> None:
    """A session's turns, and plain messages with a known beginning, are admitted to the lane of who has their pages."""
    family = Family("chat.sim-chat")
    async with aiohttp.ClientSession(two.url) as http:

        async def say(messages: list[Any], **more: Any) -> tuple[str, int, str]:
            body = {"messages": messages, "max_tokens": 8, **more}
            async with http.post("/v1/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                job = await bus.jobs.get(response.headers["x-request-id"])
            assert job is not None
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return job.lane, cached, answer["choices"][0]["message"]["content"]

        async with asyncio.timeout(60):
            while len(await bus.workers.living(family)) < 2:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        await asyncio.sleep(2 * FRESH_S)  # so old may be what router and workers know of each other
        plain = [{"role": "user", "content": WORDS[::-1]}]
        lane, cached, said = await say(plain)
        assert (lane, cached) == ("gpu", 0)
        async with asyncio.timeout(60):  # a prompt is marked once its answer is out
            while not await bus.connection.call("ZCARD", keys.prefixes(family)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        plain += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        lane, cached, _ = await say(plain)
        assert lane.startswith("w.")
        assert cached > len(WORDS) - 64

        async with http.post("/v1/sessions", json={"model": "sim-chat"}) as response:
            session = (await response.json())["id"]
        lane, cached, _ = await say([{"role": "user", "content": WORDS}], session=session)
        assert (lane, cached) == ("gpu", 0)
        lanes = [
            await say([{"role": "user", "content": f"turn {n}"}], session=session) for n in range(6)
        ]
        assert len({lane for lane, _, _ in lanes}) == 1
        assert lanes[0][0].startswith("w.")
        assert all(cached > len(WORDS) - 64 for _, cached, _ in lanes)
