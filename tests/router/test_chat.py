"""/v1/chat/completions and /v1/completions over a scripted generator: shapes, streams, resuming, sessions, errors."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from common.errors import InvalidRequest
from common.messages import Logprob, Piece
from tests.router.mesh import Mesh
from tests.router.scripted import NAME, Generator, Scene, echo, generator

RESUMABLE = {"Spillway-Resume": "60"}


@pytest.fixture
async def model(mesh: Mesh) -> AsyncIterator[Generator]:
    """A scripted generator on the mesh, known to its router."""
    async with generator(mesh.redis.url, mesh.directory) as made:
        async with aiohttp.ClientSession(mesh.url) as session, asyncio.timeout(20):
            while True:
                async with session.get(f"/v1/models/{NAME}") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
        yield made


def asks(text: str = "one two three", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **more}


async def post(
    http: aiohttp.ClientSession, body: Any, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any, Any]:
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers


def frames_of(raw: bytes) -> list[tuple[str, Any]]:
    """Return (id, data) of a stream's events; data is "[DONE]" or decoded JSON."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            data = fields["data"]
            found.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return found


async def stream(
    http: aiohttp.ClientSession, body: Any, path: str = "/v1/chat/completions", **headers: str
) -> tuple[list[tuple[str, Any]], Any]:
    async with http.post(path, json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return frames_of(await response.read()), response.headers


def text_of(frames: list[tuple[str, Any]], choice: int = 0) -> str:
    choices = [c for _, data in frames if isinstance(data, dict) for c in data.get("choices", ())]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == choice)


async def test_an_answer_has_openais_shape(http: aiohttp.ClientSession, model: Generator) -> None:
    status, answer, headers = await post(http, asks())
    message = {"role": "assistant", "content": "one two three", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert status == 200, answer
    assert (answer["object"], answer["model"], answer["choices"]) == (
        "chat.completion",
        NAME,
        [choice],
    )
    usage = answer["usage"]
    assert (
        usage["total_tokens"]
        == usage["prompt_tokens"] + usage["completion_tokens"]
        == 13 + usage["prompt_tokens"]
    )
    assert answer["id"] == f"chatcmpl-{headers['x-request-id'].split('~')[-1]}"


async def test_a_stream_has_openais_shape(http: aiohttp.ClientSession, model: Generator) -> None:
    frames, _ = await stream(http, asks(stream_options={"include_usage": True}))
    ids = [name for name, _ in frames]
    chunks = [data for _, data in frames[:-1]]
    assert frames[-1] == ("", "[DONE]")
    assert ids == ["", "0.0", "1.0", "2.0", "", ""]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["usage"] for c in chunks[:-1]] == [None] * 4
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 13)
    assert text_of(frames) == "one two three"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
