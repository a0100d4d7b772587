"""/v1/responses with the official client: whole and streamed, stored and continued, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from common.bus import Bus
from common.errors import JobFailed
from common.registry.sessions import Sessions
from tests.integration.router.test_tools import says
from tests.support.chat import CHAT, post
from tests.support.mesh import Mesh
from tests.support.scripted_generator import (
    NAME,
    Generator,
    Scene,
    byte_tokenizer,
    echo,
    generator,
)
from tests.support.session_traces import holding
from tests.support.tool_templates import QWEN
from tests.support.waiting import until

PATH, TOOLED = "/v1/responses", "tooled"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLED = [
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
]
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
async def client(mesh: Mesh, model: Generator) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client; the scripted generator says what it was asked last, and what it was asked in all."""
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asked_of(model: Generator) -> list[str]:
    """Return the prompts that the generator was given, those of this test."""
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(work.prompts[0], skip_special_tokens=False) for work in model.works]


async def test_a_response_is_the_chat_that_says_the_same(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession, model: Generator
) -> None:
    """Input as a text or as messages, with instructions, is the chat with a system message: one prompt, one answer."""
    parts: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "one two"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        {"role": "user", "content": "three four"},
    ]
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "three four"},
    ]
    listed = await client.responses.create(model=NAME, input=parts, store=False)
    status, said, _ = await post(http, {"model": NAME, "messages": chat}, CHAT)
    plain = await client.responses.create(
        model=NAME, input="three four", instructions="Be short.", metadata={"a": "b"}, user="me"
    )

    assert status == 200
    assert listed.output_text == said["choices"][0]["message"]["content"] == "three four"
    prompts = asked_of(model)
    assert prompts[0] == prompts[1]
    assert prompts[2].startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nthree")
    assert listed.usage is not None
    assert (listed.usage.input_tokens, listed.usage.output_tokens) == (
        said["usage"]["prompt_tokens"],
        said["usage"]["completion_tokens"],
    )
    assert (plain.status, plain.object, plain.model) == ("completed", "response", NAME)
    assert (plain.metadata, plain.user, plain.instructions) == ({"a": "b"}, "me", "Be short.")
    assert plain.id.startswith("resp_")
    assert str(plain.output[0].id).startswith("msg_")


async def test_a_stream_has_the_named_events(client: openai.AsyncOpenAI) -> None:
    """Events come in OpenAI's order with rising numbers, deltas make the text, and the last one holds the response."""
    stream = await client.responses.create(model=NAME, input="one two three", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]

    assert list(dict.fromkeys(kinds)) == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(deltas) > 1
    assert last.type == "response.completed"
    assert "".join(deltas) == last.response.output_text == "one two three"
    again = await client.responses.retrieve(last.response.id)
    assert again.output_text == "one two three"
    assert again.output[0].id == last.response.output[0].id
    async with client.responses.stream(model=NAME, input="four five") as helped:
        final = await helped.get_final_response()
    assert final.output_text == "four five"


async def test_a_stream_that_broke_goes_on(
    http: aiohttp.ClientSession, client: openai.AsyncOpenAI
) -> None:
    """With Last-Event-ID the rest comes, numbered as before; by the key and by the request's own route."""
    body = {"model": NAME, "input": "one two three four", "stream": True}
    key = {"Idempotency-Key": "broken response"}
    async with http.post(PATH, json=body, headers=key) as response:
        whole, name = (await response.read()).decode(), response.headers["x-request-id"]
    ids = [line[4:] for line in whole.split("\n") if line.startswith("id: ")]
    cut = whole.index(f"id: {ids[1]}\n")
    rest = whole[whole.index("\n\n", cut) + 2 :]
    async with http.post(PATH, json=body, headers={**key, "Last-Event-ID": ids[1]}) as response:
        assert _events((await response.read()).decode()) == _events(rest)
    path = f"/v1/requests/{name}/events"
    async with http.get(path, headers={"Last-Event-ID": ids[1]}) as response:
        assert _events((await response.read()).decode()) == _events(rest)
    async with http.get(f"/v1/requests/{name}") as response:
        assert (await response.json())["result"]["object"] == "response"


def _events(raw: str) -> list[Any]:
    """Return the data of a stream's events, without what a later reader cannot know."""
    lines = [line[6:] for line in raw.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


async def test_a_response_goes_on_from_another(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession, model: Generator
) -> None:
    """Earlier turns come back without their instructions; several go on from one turn; what is not stored is gone."""
    first = await client.responses.create(model=NAME, input="one", instructions="Be kind.")
    second = await client.responses.create(
        input="two", previous_response_id=first.id, instructions="Be short."
    )
    third = await client.responses.create(input="three", previous_response_id=second.id)
    other = await client.responses.create(input="zwei", previous_response_id=first.id, store=False)
    branch = await client.responses.create(input="deux", previous_response_id=first.id)
    tip = await client.responses.create(input="trois", previous_response_id=branch.id)
    prompts = asked_of(model)

    def turns(*words: str) -> str:
        said = "".join(
            f"<|im_start|>user\n{w}<|im_end|>\n<|im_start|>assistant\n{w}<|im_end|>\n"
            for w in words[:-1]
        )
        return f"{said}<|im_start|>user\n{words[-1]}<|im_end|>\n<|im_start|>assistant\n"

    assert prompts[1] == f"<|im_start|>system\nBe short.<|im_end|>\n{turns('one', 'two')}"
    assert prompts[2] == turns("one", "two", "three")
    assert (prompts[3], prompts[4]) == (turns("one", "zwei"), turns("one", "deux"))
    assert prompts[5] == turns("one", "deux", "trois")
    assert len({first.id, second.id, third.id, other.id, branch.id, tip.id}) == 6
    kept_in: list[Any] = [first, second, third, branch, tip]
    sessions = [each.session for each in kept_in]
    assert [each["version"] for each in sessions] == [1, 2, 3, 2, 3]
    assert sessions[0]["id"] == sessions[2]["id"] != sessions[3]["id"] == sessions[4]["id"]
    kept = await client.responses.retrieve(second.id)
    assert (kept.output_text, kept.instructions, kept.previous_response_id) == (
        "two",
        "Be short.",
        first.id,
    )
    assert kept.usage is not None
    assert second.usage is not None
    assert kept.usage.input_tokens == second.usage.input_tokens
    near = first.id[:-1] + ("y" if first.id.endswith("x") else "x")
    for gone in (other.id, "resp_x", near, f"resp_{'~' * 2}x"):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.retrieve(gone)
        assert unknown.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input="x", previous_response_id=gone)
        assert refused.value.code == "previous_response_not_found"


@pytest.fixture
async def tooled(mesh: Mesh, tmp_path: Path) -> AsyncIterator[Generator]:
    """A scripted model whose template knows tools and reasoning, and whose answers can be bound."""
    template = QWEN + "{#- <think></think> #}"
    more = {"name": TOOLED, "chat_template": template, "grammars": True}
    async with generator(mesh.redis.url, tmp_path, **more) as made:
        mesh_url = f"{mesh.url}/v1/models/{TOOLED}"
        async with aiohttp.ClientSession() as session:

            async def served() -> bool:
                async with session.get(mesh_url) as response:
                    return response.status == 200

            await until(served, "the router knows the model")
        yield made


async def test_calls_of_functions_are_items(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession, tooled: Generator
) -> None:
    """A call is an item of the output, in a stream with its events; what it gave goes on as it does in a chat."""
    question, city = "How is it in Paris?", '{"city": "Paris"}'
    wrote = f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {city}}}\n</tool_call>'
    tooled.script = says(wrote)
    asked: Any = {"model": TOOLED, "input": question, "tools": [WEATHER]}
    whole = await client.responses.create(**asked)
    stream = await client.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    last: Any = events[-1]
    thought, call = whole.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert [item.type for item in last.response.output] == ["reasoning", "function_call"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [*EVENTS[:4], *CALLED, EVENTS[-1]]
    again = await client.responses.retrieve(whole.id)
    assert [item.model_dump() for item in again.output] == [
        item.model_dump() for item in whole.output
    ]

    tooled.script = says("It rains.")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    stored = await client.responses.create(
        model=TOOLED, input=[output], previous_response_id=whole.id, tools=[WEATHER]
    )
    items: Any = [{"role": "user", "content": question}, call.model_dump(), output]
    listed = await client.responses.create(model=TOOLED, input=items, tools=[WEATHER])
    chat = [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    nested = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}
    status, _, _ = await post(http, {"model": TOOLED, "messages": chat, "tools": [nested]}, CHAT)
    prompts = asked_of(tooled)
    assert (status, stored.output_text, listed.output_text) == (200, "It rains.", "It rains.")
    assert prompts[-1] == prompts[-2] == prompts[-3]


async def test_a_format_binds_as_in_a_chat(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession, tooled: Generator
) -> None:
    """text.format and a required call reach the worker as a chat's response_format and tool_choice do."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "name": "a", "schema": schema}
    tooled.script = says('{"a":1}')
    for form, same in (
        (named, {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
        ({"type": "json_object"}, {"type": "json_object"}),
    ):
        text: Any = {"format": form}
        found = await client.responses.create(model=TOOLED, input="x", text=text)
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": same}
        await post(http, {"model": TOOLED, **body}, CHAT)
        assert found.output_text == '{"a":1}'
        assert found.text is not None
        assert found.text.format is not None
        assert found.text.format.type == form["type"]
        assert tooled.works[-1].grammar == tooled.works[-2].grammar is not None
    chosen: Any = {"type": "function", "name": "weather"}
    await client.responses.create(model=TOOLED, input="x", tools=[WEATHER], tool_choice=chosen)
    assert tooled.works[-1].grammar is not None


async def test_two_that_go_on_from_one_at_once_both_do(
    client: openai.AsyncOpenAI, model: Generator
) -> None:
    """A session takes one turn at a time: the other response has a session of its own, and the same conversation."""
    first = await client.responses.create(model=NAME, input="one")
    wait = asyncio.Event()

    async def late(scene: Scene) -> None:
        await wait.wait()
        await echo(scene)

    model.script = late
    both = [
        asyncio.create_task(client.responses.create(input=text, previous_response_id=first.id))
        for text in ("two", "zwei")
    ]
    await until(lambda: len(model.works) == 3, "both responses are generated")
    wait.set()
    found = await asyncio.gather(*both)

    assert [each.output_text for each in found] == ["two", "zwei"]
    assert len({getattr(each, "session", {})["id"] for each in found}) == 2


async def serves_sessions(http: aiohttp.ClientSession) -> None:
    """Wait until a kv_store is up."""

    async def listed() -> bool:
        async with http.get("/v1/sessions") as response:
            return response.status == 200

    await until(listed, "kv_store is up")


async def test_responses_are_deleted_one_by_one(
    mesh: Mesh, http: aiohttp.ClientSession, client: openai.AsyncOpenAI, bus: Bus, model: Generator
) -> None:
    """A deleted response is gone, and out of the conversation that goes on; the last one takes its session with it.

    A copy in another session, which went on beside it, stands without it.
    """
    store = mesh.add("kv_store", "responses")
    first = await client.responses.create(model=NAME, input="one")
    second = await client.responses.create(input="rosebud", previous_response_id=first.id)
    third = await client.responses.create(input="three", previous_response_id=second.id)
    beside = await client.responses.create(input="beside", previous_response_id=first.id)
    try:
        await serves_sessions(http)
        await client.responses.delete(second.id)
        assert await holding(bus, "rosebud") == []
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await client.responses.create(input="x", previous_response_id=second.id)
        kept = await client.responses.retrieve(third.id)
        assert (kept.output_text, kept.usage and kept.usage.input_tokens) == (
            "three",
            third.usage and third.usage.input_tokens,
        )
        fourth = await client.responses.create(input="four", previous_response_id=third.id)
        assert fourth.output_text == "four"
        fifth = await client.responses.create(input="five", previous_response_id=fourth.id)
        sessions = [getattr(each, "session", {})["id"] for each in (first, fourth, fifth)]
        assert len(set(sessions)) == 1
        prompts = [prompt.replace("<|im_end|>", "") for prompt in asked_of(model)]
        assert not any("rosebud" in prompt for prompt in prompts[-2:])
        assert prompts[-2].count("user\n") == 3
        assert prompts[-1].startswith(prompts[-2])
        for each in (first, fifth, beside, third, fourth):
            await client.responses.delete(each.id)
    finally:
        store.stop()

    for unknown in (beside.id, fourth.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(unknown)
    for each in (beside, fourth):
        assert await Sessions(bus).stored(getattr(each, "session", {})["id"]) is None


async def test_a_response_is_deleted_between_two_turns(
    mesh: Mesh, http: aiohttp.ClientSession, client: openai.AsyncOpenAI, model: Generator
) -> None:
    """While another response is generated in its session a deletion is refused, to be tried again; then it is done."""
    store = mesh.add("kv_store", "busy")
    first = await client.responses.create(model=NAME, input="one")
    wait = asyncio.Event()

    async def late(scene: Scene) -> None:
        await wait.wait()
        await echo(scene)

    model.script = late
    asked = client.responses.create(input="two", previous_response_id=first.id)
    running = asyncio.create_task(asked)
    second = None
    try:
        await until(lambda: len(model.works) == 2, "the second is generated")
        await serves_sessions(http)
        once = client.with_options(max_retries=0, timeout=60)
        with pytest.raises(openai.ConflictError) as refused:
            await once.responses.delete(first.id)
        assert refused.value.code == "session_busy"
        wait.set()
        second = await running
        await once.responses.delete(first.id)
    finally:
        wait.set()
        store.stop()
    assert second.output_text == "two"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    assert (await client.responses.retrieve(second.id)).output_text == "two"


async def test_a_response_cut_short_is_incomplete(
    client: openai.AsyncOpenAI, model: Generator
) -> None:
    """max_output_tokens reaches the model, and an answer that it ends is `incomplete`, also in a stream."""

    async def short(scene: Scene) -> None:
        assert scene.work.max_new == 3
        await scene.text("one", finish="length")
        await scene.end()

    model.script = short
    whole = await client.responses.create(model=NAME, input="x", max_output_tokens=3)
    stream = await client.responses.create(model=NAME, input="x", max_output_tokens=3, stream=True)
    last = [event async for event in stream][-1]

    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"


async def test_an_error_in_mid_stream_ends_it(
    http: aiohttp.ClientSession, client: openai.AsyncOpenAI, model: Generator
) -> None:
    """The official client raises it; others find an event `error` with code and message."""

    async def broken(scene: Scene) -> None:
        await scene.text("one ")
        raise JobFailed("the model broke", code="model_error")

    model.script = broken
    with pytest.raises(openai.APIError) as caught:
        async for _ in await client.responses.create(model=NAME, input="x", stream=True):
            pass
    async with http.post(PATH, json={"model": NAME, "input": "x", "stream": True}) as response:
        last = (await response.read()).decode().strip().split("\n\n")[-1]

    assert caught.value.message
    assert last.startswith("event: error\n")
    assert json.loads(last.split("data: ")[1])["code"] == caught.value.code


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "name": "f"}]}, "unsupported", "tools"),
    ({"tools": [{"type": "web_search"}]}, "unsupported", "tools[0]"),
    ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0].name"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "unsupported", "response_format"),
    ({"background": True}, "unsupported", "background"),
    ({"conversation": "conv_1"}, "unsupported", "conversation"),
    ({"prompt": {"id": "p"}}, "unsupported", "prompt"),
    ({"truncation": "auto"}, "unsupported", "truncation"),
    ({"text": {"format": {"type": "json_object"}}}, "unsupported", "response_format"),
    ({"n": 2}, "unsupported", "n"),
    ({"input": []}, "invalid_value", "input"),
    ({"input": [{"role": "user"}]}, "invalid_value", "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
    ({"input": [{"type": "function_call_output"}]}, "invalid_value", "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "invalid_value", "input[0]"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "unsupported", "input[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "unsupported",
        "input[0].content[0]",
    ),
    ({"metadata": {"a": "x" * 513}}, "invalid_value", "metadata[...]"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"input": "x" * 3000}, "context_length_exceeded", "input"),
    ({"stream_options": {}}, "invalid_value", "stream_options"),
]


async def test_what_it_cannot_do_is_refused(
    http: aiohttp.ClientSession, client: openai.AsyncOpenAI, bus: Bus
) -> None:
    """Nothing that would change the answer is ignored, and a refused response leaves no session behind."""
    before = await Sessions(bus).page("default", None, 1000)
    for change, code, param in BAD:
        status, found, _ = await post(http, {"model": NAME, "input": "x", **change}, PATH)
        assert (status, found["error"]["code"], found["error"]["param"]) == (400, code, param), (
            change
        )
    status, found, _ = await post(http, {"model": "nobody", "input": "x"}, PATH)
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    late = {"Spillway-Timeout": "0.001"}
    status, found, _ = await post(http, {"model": NAME, "input": "x"}, PATH, **late)
    assert status in {429, 504}
    assert await Sessions(bus).page("default", None, 1000) == before
