"""Whole tool loops through the `openai` client while the worker or the router is killed: the same calls and answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai
import pytest

from tests.conftest import PROFILE
from tests.support.mesh import Mesh, Process
from tests.support.servers import free_port
from tests.support.tool_templates import write_model

SOAK = PROFILE == "soak"
PARTS, LOOPS = (
    (10, 10) if SOAK else (1, 2)
)  # 100 loops in the soak, which goes on with the parts that are left
MODEL = "tool-loops"
FLAGS = ("--device", "cpu", "--embed-model", "none", "--threads", "1", "--chat-dtype", "fp32")
NOTE = {"type": "string", "minLength": 10, "maxLength": 30}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo", "Lima"]}, "note": NOTE},
        "required": ["city", "note"], "additionalProperties": False}}}
    for name in ("get_weather", "get_time")
]  # fmt: skip
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
CHOICES: tuple[Any, ...] = (NAMED, "required", "none")  # of a loop's requests, one after another
LOST = (openai.APIConnectionError, httpx2.HTTPError)


class Said(NamedTuple):
    """An answer: its text, its calls as names and arguments, its end, and how many tokens it has."""

    content: str
    calls: tuple[tuple[str, str], ...]
    finish: str | None
    tokens: int


class Victims:
    """The processes that a loop may lose: two workers, of which one is always there, and a router at a fixed port."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self._mesh, self._model = mesh, str(write_model(directory / MODEL))
        self.port = free_port()
        self._router = mesh.add("router", "loops", "--port", str(self.port), "--drain-s", "5")
        self._workers = [self._worker() for _ in range(2)]
        self.killed: list[str] = []

    def _worker(self) -> Process:
        name = f"loops{len(self._mesh.processes)}"
        return self._mesh.add("gpu_worker", name, *FLAGS, "--chat-model", self._model)

    @property
    def url(self) -> str:
        """Where the router listens, whatever happened to it."""
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> None:
        """Wait until the router answers, and knows the model."""
        self._mesh.wait_ready(self.url)
        self._mesh.wait_generator(self.url, MODEL)

    async def kill(self, what: str, draw: random.Random) -> None:
        """End a process without a warning, and start another in its place."""
        self.killed.append(what)
        if what == "router":
            await asyncio.to_thread(self._router.kill)
            self._router.start()
            return
        for worker in self._workers:  # the one that takes over has started
            await asyncio.to_thread(worker.ports)
        victim = self._workers.pop(draw.randrange(2))
        await asyncio.to_thread(victim.kill)
        self._workers.append(self._worker())


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    mesh = Mesh()
    try:
        found = Victims(mesh, tmp_path_factory.mktemp("models"))
        found.ready()
        yield found
    finally:
        mesh.close()


@pytest.fixture
async def client(victims: Victims) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{victims.url}/v1", api_key="none") as made:
        yield made


async def nothing(_tokens: int) -> None:
    """What happens amid an undisturbed loop."""


class ToolLoop:
    """A question, two calls with their results, and the answer; `amid(n)` is called when n tokens were read."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        number: int,
        run: str,
        amid: Callable[[int], Awaitable[None]] = nothing,
    ) -> None:
        self._client, self._number, self._run, self._amid = client, number, run, amid
        self._tokens = 0

    async def go(self) -> list[Said]:
        """Go through the loop, and return what the model said in each turn."""
        messages: list[Any] = [{"role": "user", "content": f"{self._number}: how is it there?"}]
        found = []
        for turn, choice in enumerate(CHOICES):
            said = await self._insist(turn, messages, choice)
            found.append(said)
            called = [(f"call-{turn}-{n}", *call) for n, call in enumerate(said.calls)]
            calls = [
                {"id": each, "type": "function", "function": {"name": name, "arguments": text}}
                for each, name, text in called
            ]
            message = {"role": "assistant", "content": said.content or None}
            messages.append(message | ({"tool_calls": calls} if calls else {}))
            for each, name, text in called:
                result = f"{name}: {json.loads(text)['city']}, 20 degrees"
                messages.append({"role": "tool", "tool_call_id": each, "content": result})
        return found

    async def _insist(self, turn: int, messages: list[Any], choice: Any) -> Said:
        """Ask until the answer is whole: the same request under the same key, however often the connection is lost."""
        async with asyncio.timeout(120):
            while True:
                try:
                    return await self._ask(turn, messages, choice)
                except LOST:
                    await asyncio.sleep(0.2)
                except openai.InternalServerError as error:
                    if error.status_code != 503:  # so long as the router is only just back
                        raise
                    await asyncio.sleep(0.2)

    async def _ask(self, turn: int, messages: list[Any], choice: Any) -> Said:
        content, finish, tokens = "", None, 0
        calls: dict[int, list[str]] = {}
        stream = await self._client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
            temperature=1.0, seed=self._number, max_tokens=40 if choice == "none" else 200, logprobs=True, stream=True,
            extra_headers={"Idempotency-Key": f"{self._run}-{self._number}-{turn}"},
        )  # fmt: skip
        async for chunk in stream:
            for each in chunk.choices:
                finish = each.finish_reason or finish
                content += each.delta.content or ""
                drawn = len((each.logprobs and each.logprobs.content) or ())
                self._tokens, tokens = self._tokens + drawn, tokens + drawn
                for call in each.delta.tool_calls or ():
                    assert call.function is not None
                    held = calls.setdefault(call.index, ["", ""])
                    held[0] += call.function.name or ""
                    held[1] += call.function.arguments or ""
            await self._amid(self._tokens)
        return Said(content, tuple((name, text) for name, text in calls.values()), finish, tokens)


@dataclasses.dataclass(slots=True)
class Blow:
    """A process that is killed once `at` tokens were read."""

    victims: Victims
    what: str
    draw: random.Random
    at: int
    fallen: bool = False

    async def amid(self, tokens: int) -> None:
        """Kill if it is time."""
        if tokens >= self.at and not self.fallen:
            self.fallen = True
            await self.victims.kill(self.what, self.draw)


@pytest.mark.timeout(0 if SOAK else 180)
@pytest.mark.parametrize("part", range(PARTS))
async def test_tool_loops_survive_kills(
    victims: Victims,
    client: openai.AsyncOpenAI,
    seed: int,
    part: int,
    record: Callable[[str, object], None],
) -> None:
    """A loop that lost its worker or its router at a random token ends as the same loop did undisturbed."""
    draw = random.Random(f"{seed} {part}")
    print(f"SPILLWAY_SEED={seed}")
    victims.killed.clear()
    numbers = range(part * LOOPS, (part + 1) * LOOPS)
    for number in numbers:
        whole = await ToolLoop(client, number, f"plain-{seed}").go()
        assert [len(said.calls) for said in whole] == [1, 1, 0]
        assert [said.finish for said in whole][:2] == ["tool_calls"] * 2
        what, most = ("worker", "router")[number % 2], sum(said.tokens for said in whole)
        blow = Blow(victims, what, draw, draw.randint(1, most))

        found = await ToolLoop(client, number, f"killed-{seed}", blow.amid).go()

        told = f"loop {number}, {what} killed at token {blow.at}, SPILLWAY_SEED={seed}"
        assert [said[:3] for said in found] == [said[:3] for said in whole], told
    assert victims.killed == [("worker", "router")[number % 2] for number in numbers]
    record("loops", LOOPS)
    record("kills", len(victims.killed))
