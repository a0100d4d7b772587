"""How the router's tests talk to it about generations."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp

from tests.support.scripted_generator import NAME

CHAT = "/v1/chat/completions"


def asks(text: str = "one two three", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **more}


async def post(
    http: aiohttp.ClientSession, body: Any, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any, Any]:
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def stored(http: aiohttp.ClientSession, texts: Mapping[str, str]) -> str:
    """Return a new collection of documents: a text for each id."""
    name = f"p{uuid.uuid4().hex[:12]}"
    assert (await post(http, {"name": name}, "/v1/collections"))[0] == 201
    documents = [{"id": key, "text": text} for key, text in texts.items()]
    path = f"/v1/collections/{name}/documents"
    status, told, _ = await post(http, {"documents": documents}, path)
    assert status == 200, told
    return name


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
