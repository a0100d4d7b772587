"""The `openai` client against a router and a real small model: what it says streamed, whole, and turn by turn."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import aiohttp
import openai
import pydantic
import pytest

from tests.support.mesh import ROOT, START_S, Mesh

MODEL = "spillway-demo"
QUESTION: Any = [{"role": "user", "content": "Where is the river?"}]


@pytest.fixture(scope="module")
def real(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with the model that ships, on the CPU, and kv_store."""
    flags = ("--device", "cpu", "--embed-model", "none", "--threads", "1", "--chat-dtype", "fp32")
    worker = mesh.add("gpu_worker", "real", *flags, "--chat-model", str(ROOT / "models/demo"))
    store = mesh.add("kv_store", "real")
    give_up = time.monotonic() + START_S
    while b'"' + MODEL.encode() not in urllib.request.urlopen(f"{mesh.url}/v1/models").read():
        assert time.monotonic() < give_up, worker.log.read_text()[-4000:]
        time.sleep(0.1)
    yield mesh
    worker.stop()
    store.stop()


@pytest.fixture
async def client(real: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="unused") as made:
        yield made


async def test_a_stream_says_what_the_answer_says(client: openai.AsyncOpenAI) -> None:
    """Greedy, the same text and ends, streamed and whole, for each of n choices; a seed repeats a drawn one."""
    options: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = await client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    text, usage = "", None
    async for chunk in await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert (text, usage) == (whole.choices[0].message.content, whole.usage)
    assert whole.usage is not None
    assert whole.usage.completion_tokens >= len(logprobs.content) >= 1
    for one in logprobs.content:
        assert (
            one.logprob == one.top_logprobs[0].logprob == max(t.logprob for t in one.top_logprobs)
        )
    beyond = {"min_tokens": 24}  # past its own end the model is sure of nothing
    drawn = {**options, "temperature": 2.0, "seed": 7, "n": 3, "extra_body": beyond}
    first, second = [await client.chat.completions.create(**drawn) for _ in range(2)]
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len({c.message.content for c in first.choices}) > 1


async def test_stop_strings_end_an_answer(client: openai.AsyncOpenAI) -> None:
    """The stop string is not part of the text, and nothing follows it."""
    options: Any = {"model": MODEL, "prompt": "The river", "max_tokens": 32, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    free = (await client.completions.create(**options)).choices[0]
    assert (free.finish_reason, len(free.text) > 8) == ("length", True)
    stop = free.text[4:6]
    cut = (await client.completions.create(**options, stop=[stop])).choices[0]
    assert (cut.finish_reason, cut.text) == ("stop", free.text[: free.text.index(stop)])


async def test_a_conversation_over_a_session(real: Mesh, client: openai.AsyncOpenAI) -> None:
    """Each turn adds to what was said; nothing of it is sent again, nothing is lost."""
    async with (
        aiohttp.ClientSession(real.url) as http,
        http.post("/v1/sessions", json={"model": MODEL}) as made,
    ):
        assert made.status == 201, await made.text()
        session = (await made.json())["id"]
    options: Any = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    held, said = 0, []
    for text in ("Where is the river?", "And the hill?", "Thanks."):
        new: Any = [{"role": "user", "content": text}]
        turn = await client.chat.completions.create(
            **options, messages=new, extra_body={"session": session}
        )
        said.append(turn.choices[0].message.content)
        assert turn.usage is not None
        assert turn.usage.prompt_tokens > held  # all that was said before, and the new message
        held = turn.usage.total_tokens
        if len(said) == 1:
            plain = await client.chat.completions.create(**options, messages=new)
            assert said == [plain.choices[0].message.content]
    url = f"{real.url}/v1/sessions/{session}?include=messages"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        kept = await response.json()
    assert (kept["version"], kept["turns"]) == (3, 3)
    assert [m["content"] for m in kept["messages"] if m["role"] == "assistant"] == said
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body={"session": session[:-1] + "!"}
        )


class Place(pydantic.BaseModel):
    """What the answers below are read into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["river", "hill", "town"]
    steps: Annotated[
        list[Annotated[int, pydantic.Field(ge=0, le=99)]], pydantic.Field(max_length=3)
    ]
    inside: bool | None


async def test_answers_are_bound_to_schemas(real: Mesh, client: openai.AsyncOpenAI) -> None:
    """The client's own reading of an answer into a class works, whole, streamed, in n choices, and on completions."""
    options: Any = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "max_tokens": 200}
    parsed = await client.chat.completions.parse(**options, response_format=Place, n=3, seed=5)
    texts = [choice.message.content for choice in parsed.choices]
    assert [choice.finish_reason for choice in parsed.choices] == ["stop"] * 3
    assert all(isinstance(choice.message.parsed, Place) for choice in parsed.choices)
    schema = {"name": "place", "schema": Place.model_json_schema()}
    form: Any = {"type": "json_schema", "json_schema": schema}
    streamed = ["", "", ""]
    async for chunk in await client.chat.completions.create(
        **options, response_format=form, n=3, seed=5, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    for text in streamed:
        Place.model_validate_json(text)
    assert len(set(texts)) > 1
    body = {"response_format": {"type": "regex", "regex": "(yes|no), [0-9]{2}"}}
    said = await client.completions.create(model=MODEL, prompt="So", max_tokens=50, extra_body=body)
    assert re.fullmatch("(yes|no), [0-9]{2}", said.choices[0].text)
    cut = await client.chat.completions.create(**options | {"max_tokens": 3}, response_format=form)
    assert cut.choices[0].finish_reason == "length"
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="schema") as refused:
        await client.chat.completions.create(**options, response_format=wrong)
    assert refused.value.code == "invalid_grammar"


async def test_bound_answers_are_counted(real: Mesh, client: openai.AsyncOpenAI) -> None:
    """The worker tells whole answers from those that were cut off."""
    worker = next(each for each in real.processes if each.instance == "real")
    url = f"http://127.0.0.1:{worker.ports()['health_port']}/metrics"
    for most in (50, 1):
        form: Any = {"response_format": {"type": "regex", "regex": "[ab]{4}"}}
        await client.completions.create(model=MODEL, prompt="So", max_tokens=most, extra_body=form)
    seen = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    for finish in ("stop", "length"):
        found = re.search(rf'spillway_structured_answers_total{{finish="{finish}"}} (\S+)', seen)
        assert found is not None
        assert float(found[1]) >= 1
