"""Chat, completions and sessions in whole: what is sent, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

import spillway_client as sw

from .conftest import Server
from .test_client import breaks, fails, says

ANSWER = {
    "id": "chat.m~0~1",
    "object": "chat.completion",
    "created": 5,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The Danube [1].",
                "citations": [
                    {"index": 1, "document_id": "d", "start": 4, "end": 9, "at": [11, 14]}
                ],
            },
            "finish_reason": "stop",
            "logprobs": None,
        }
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
    "retrieval": {
        "collection": "c",
        "found": 1,
        "passages": [
            {"index": 1, "document_id": "d", "chunk": 2, "start": 0, "end": 9, "score": 0.5, "text": "t"}
        ],
    },
}  # fmt: skip
SESSION = {
    "id": "chat.m~0~s",
    "object": "session",
    "model": "m",
    "version": 2,
    "turns": 2,
    "tokens": 40,
    "ttl_s": 60,
    "metadata": {"a": 1},
}


async def test_chat(server: Server) -> None:
    """A whole answer has text, citations, passages and usage; a call that broke is repeated under its key."""
    server.answers = [breaks, says(200, ANSWER)]
    async with sw.AsyncSpillway(server.url) as client:
        answer = await client.chat.completions.create(
            [{"role": "user", "content": "which river?"}],
            retrieval={"collection": "c", "k": 3, "include_passages": True},
            temperature=0,
            extra={"new_field": 1},
        )

    assert (answer.text, answer.request_id) == ("The Danube [1].", "r1")
    assert answer.citations == [sw.Citation(1, "d", 4, 9, (11, 14))]
    assert answer.passages == [sw.Passage(1, "d", 2, 0, 9, 0.5, "t")]
    assert answer.usage == sw.TokenUsage(9, 4, 13, 3)
    assert len({request.headers["Idempotency-Key"] for request in server.seen}) == 1
    assert float(server.seen[1].headers["Spillway-Timeout"]) > 500
    assert json.loads(server.bodies[1]) == {
        "messages": [{"role": "user", "content": "which river?"}],
        "retrieval": {"collection": "c", "k": 3, "include_passages": True},
        "temperature": 0,
        "new_field": 1,
    }


async def test_tools(server: Server) -> None:
    """Calls and reasoning are read, and go back with the next request as they came; so does a format."""
    function = {"name": "now", "arguments": '{"zone": "UTC"}'}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "reasoning_content": "Hm.",
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    server.answers = [says(200, {**ANSWER, "choices": [choice]}), says(200, ANSWER)]
    tools = [{"type": "function", "function": {"name": "now"}}]
    async with sw.AsyncSpillway(server.url) as client:
        answer = await client.chat.completions.create("when?", tools=tools, tool_choice="required")
        said = answer.choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "noon"}
        await client.chat.completions.create(
            [{"role": "user", "content": "when?"}, said.as_dict(), result],
            response_format=sw.json_format({"type": "object"}, "time"),
        )

    assert said.tool_calls == [sw.ToolCall("abcdefghi", "now", '{"zone": "UTC"}')]
    assert (said.content, said.reasoning) == ("", "Hm.")
    first, second = (json.loads(body) for body in server.bodies)
    assert (first["tools"], first["tool_choice"]) == (tools, "required")
    assert second["messages"][1] == {**message, "content": ""}
    assert second["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "time", "schema": {"type": "object"}},
    }
    assert sw.json_format() == {"type": "json_object"}


async def test_completions(server: Server) -> None:
    """Bare prompts, several at once, in order of their choices."""
    texts = [{"index": 0, "text": "a", "finish_reason": "length"}, {"index": 1, "text": "b"}]
    payload = {"id": "i", "model": "m", "created": 1, "choices": texts}
    server.answers = [says(200, payload)]
    async with sw.AsyncSpillway(server.url) as client:
        done = await client.completions.create([[1, 2], [3]], max_tokens=1)

    assert [choice.text for choice in done.choices] == ["a", "b"]
    assert json.loads(server.bodies[0]) == {"prompt": [[1, 2], [3]], "max_tokens": 1}


async def test_sessions(server: Server) -> None:
    """A session is made, talked in with only what is new, changed, exported, loaded and deleted with proof."""
    proof = {"id": "chat.m~0~s", "deleted": True, "proof": {"redis": ["{chat.m/0}:session:*"]}}
    document = {"format": "spillway.session", "turns": []}
    server.answers = [
        says(201, SESSION),
        says(200, ANSWER),
        says(200, {**SESSION, "ttl_s": 5}),
        says(200, {"data": [SESSION], "has_more": True, "next": "n"}),
        says(200, {"data": [], "has_more": False}),
        says(200, document),
        says(201, SESSION),
        says(200, proof),
        fails(404, "session_not_found"),
    ]
    async with sw.AsyncSpillway(server.url) as client:
        made = await client.sessions.create(model="m", ttl_s=60, metadata={"a": 1})
        session = client.session(made.id)
        await session.chat("and then?", max_tokens=5)
        assert (await client.sessions.update(made.id, ttl_s=5)).ttl_s == 5
        assert [found.id async for found in client.sessions.iterate(page=1)] == [made.id]
        assert await session.export() == document
        assert (await client.sessions.load(document)).turns == 2
        assert (await session.delete()).proof == proof["proof"]
        with pytest.raises(sw.NotFoundError):
            await session.get()

    assert (made.version, made.metadata) == (2, {"a": 1})
    asked: list[tuple[str, str]] = [(r.method, r.path) for r in server.seen]
    assert asked == [
        ("POST", "/v1/sessions"),
        ("POST", "/v1/chat/completions"),
        ("PATCH", f"/v1/sessions/{made.id}"),
        ("GET", "/v1/sessions"),
        ("GET", "/v1/sessions"),
        ("GET", f"/v1/sessions/{made.id}/export"),
        ("POST", "/v1/sessions/import"),
        ("DELETE", f"/v1/sessions/{made.id}"),
        ("GET", f"/v1/sessions/{made.id}"),
    ]
    assert json.loads(server.bodies[1]) == {
        "messages": [{"role": "user", "content": "and then?"}],
        "max_tokens": 5,
        "session": made.id,
    }


@pytest.mark.parametrize("payload", [{}, {"choices": 3}, {"choices": [{"text": "no index"}]}, []])
async def test_answers_of_something_else(server: Server, payload: Any) -> None:
    """An answer that is no completion is a SpillwayError, not a KeyError."""
    server.answers = [says(200, payload)]
    async with sw.AsyncSpillway(server.url) as client:
        with pytest.raises(sw.SpillwayError):
            await client.completions.create("a")
        with pytest.raises(sw.SpillwayError):
            await client.chat.completions.create("a")
