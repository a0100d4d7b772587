"""The `openai` client against a router and a real small model: what it says streamed, whole, and turn by turn."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
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
