"""Tools through the `openai` client: calls that a model wrote, calls that it must write, and one amid a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.wire.results import Piece
from tests.support.mesh import Mesh
from tests.support.scripted_generator import Generator, Scene, generator, written
from tests.support.tool_templates import QWEN, write_model

WRITES, BOUND = "tool-writer", "tool-bound"
CITY: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}, "note": {"$ref": "#/$defs/note"}},
    "required": ["city", "note"], "additionalProperties": False,
    "$defs": {"note": {"type": "string", "minLength": 30, "maxLength": 60}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
ASKED: Any = [{"role": "user", "content": "How is it in Paris?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "note": "x"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def writer(mesh: Mesh, tmp_path: Path) -> AsyncIterator[Generator]:
    """A model with Qwen's template, which writes what a test tells it to."""
    template = QWEN + "{#- <think></think> #}"
    async with generator(mesh.redis.url, tmp_path, name=WRITES, chat_template=template) as made:
        yield made


@pytest.fixture(scope="module")
def bound(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """The model that ships with a template that knows tools; the list holds its running worker."""
    directory = write_model(tmp_path_factory.mktemp("models") / BOUND)
    flags = ("--device", "cpu", "--embed-model", "none", "--threads", "1", "--chat-dtype", "fp32")
    workers = [mesh.add("gpu_worker", "tools0", *flags, "--chat-model", str(directory))]
    mesh.wait_model(mesh.url, "generate")

    def another() -> Any:
        workers.append(
            mesh.add("gpu_worker", f"tools{len(workers)}", *flags, "--chat-model", str(directory))
        )
        return workers[-1]

    yield [workers, another]
    workers[-1].stop()


async def known(client: openai.AsyncOpenAI, name: str) -> None:
    """Wait until the router knows a model."""
    async with asyncio.timeout(90):
        while name not in {model.id async for model in client.models.list()}:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)


def says(text: str, *, size: int = 3) -> Any:
    """Return a script that writes a text in pieces of so many letters."""

    async def script(scene: Scene) -> None:
        for at in range(0, len(text), size):
            part, last = text[at : at + size], at + size >= len(text)
            await scene.say(
                Piece(
                    at=0, choice=0, tokens=written(part), text=part, finish="stop" if last else None
                )
            )
        await scene.end()

    return script


async def streamed(
    client: openai.AsyncOpenAI, **asked: Any
) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Return a stream's content, reasoning, calls (joined by their index, as clients do) and its end."""
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    finish = None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                held = calls.setdefault(call.index, ["", "", call.id or ""])
                held[0] += call.function.name or ""
                held[1] += call.function.arguments or ""
    assert all(len(each[2]) == 9 for each in calls.values())
    return content, reasoning, [(each[0], each[1]) for _, each in sorted(calls.items())], finish


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names", "finish"),
    [
        (CALL, None, "", ["get_weather"], "tool_calls"),
        (f"Both.\n{CALL}\n{NOW}", "Both.", "", ["get_weather", "now"], "tool_calls"),
        (f"<think>\nHm.\n</think>\n\n{NOW}", None, "Hm.", ["now"], "tool_calls"),
        ("It is sunny.", "It is sunny.", "", [], "stop"),
        (CALL[:-30], CALL[:-30], "", [], "stop"),
    ],
)
async def test_what_a_model_writes_is_read(
    client: openai.AsyncOpenAI, writer: Generator, text: str, content: str | None, reasoning: str,
    names: list[str], finish: str,
) -> None:  # fmt: skip
    """With `auto` an answer is content, reasoning and calls, the same whole and in a stream."""
    writer.script = says(text)
    await known(client, WRITES)
    asked: Any = {"model": WRITES, "messages": ASKED, "tools": TOOLS}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    calls = [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()
    ]
    assert (whole.message.content, [name for name, _ in calls], whole.finish_reason) == (
        content,
        names,
        finish,
    )
    assert (getattr(whole.message, "reasoning_content", None) or "") == reasoning
    assert await streamed(client, **asked) == (content or "", reasoning, calls, finish)
    prompt = Scene.asked(Scene(writer.consumer, None, writer.works[-1], 0))  # type: ignore[arg-type]
    assert '"name": "get_weather"' in prompt
    none = await client.chat.completions.create(**asked, tool_choice="none")
    assert (none.choices[0].message.tool_calls, "get_weather" in prompt) == (None, True)


async def test_a_loop_with_results(client: openai.AsyncOpenAI, writer: Generator) -> None:
    """What the client was told goes back with the result of the call, and the model reads both."""
    writer.script = says(f"{CALL}\n{NOW}")
    await known(client, WRITES)
    asked: Any = {"model": WRITES, "tools": TOOLS}
    first = (await client.chat.completions.create(**asked, messages=ASKED)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.name}"}
        for call in first.tool_calls or ()
    ]
    writer.script = says("Sunny.")
    history: Any = [*ASKED, first.model_dump(exclude_none=True), *results]
    last = (await client.chat.completions.create(**asked, messages=history)).choices[0]
    assert (last.message.content, last.finish_reason) == ("Sunny.", "stop")
    prompt = Scene.asked(Scene(writer.consumer, None, writer.works[-1], 0))  # type: ignore[arg-type]
    assert f"{CALL}\n{NOW}<|im_end|>" in prompt
    assert (
        "<tool_response>\nresult of get_weather\n</tool_response>\n<tool_response>\nresult of now"
        in prompt
    )


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),  # its workers keep to no grammar
        ({"parallel_tool_calls": False}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_refused(
    client: openai.AsyncOpenAI, writer: Generator, changes: Any, param: str
) -> None:
    """A wrong field is named; nothing is ignored."""
    await known(client, WRITES)
    asked: Any = {"model": WRITES, "messages": ASKED, "tools": TOOLS, **changes}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**asked)
    assert refused.value.param == param


async def test_calls_that_must_be_made(client: openai.AsyncOpenAI, bound: Any) -> None:
    """A model that knows nothing of tools calls them where it must: the one named, or any, with valid arguments."""
    await known(client, BOUND)
    asked: Any = {
        "model": BOUND,
        "messages": ASKED,
        "tools": TOOLS,
        "temperature": 1.0,
        "max_tokens": 400,
    }
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    one = (await client.chat.completions.create(**asked, tool_choice=named, seed=1)).choices[0]
    call: Any = (one.message.tool_calls or [None])[0]
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, one.message.content, one.finish_reason) == (
        "get_weather",
        None,
        "tool_calls",
    )
    assert arguments["city"] in {"Paris", "Oslo"}
    assert 30 <= len(arguments["note"]) <= 60
    content, _, calls, finish = await streamed(
        client, **asked, tool_choice="required", parallel_tool_calls=False
    )
    assert (content, len(calls), finish) == ("", 1, "tool_calls")
    bad: Any = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        await client.chat.completions.create(**asked | {"tools": bad}, tool_choice="required")


async def test_a_call_survives_its_worker(client: openai.AsyncOpenAI, bound: Any) -> None:
    """kill -9 while a call is written: the same call comes from another worker, under the same grammar."""
    workers, another = bound
    await known(client, BOUND)
    asked: Any = {
        "model": BOUND, "messages": ASKED, "tools": TOOLS, "temperature": 1.0, "max_tokens": 400, "seed": 3,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "logprobs": True,
    }  # fmt: skip
    whole = (await client.chat.completions.create(**asked)).choices[0].message
    calls: list[Any] = []
    chunks = 0
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        chunks += 1
        if chunks == 3:
            workers[-1].kill()
            another()
        for choice in chunk.choices:
            calls += choice.delta.tool_calls or ()
    assert [call.function.arguments for call in calls] == [
        call.function.arguments for call in whole.tool_calls or ()
    ]
    assert len(calls) == 1
