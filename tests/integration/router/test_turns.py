"""Chat turns of sessions: only the new message is sent, one turn at a time, and none is lost or doubled."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp
import pytest

from common.bus import Bus
from common.ids import job_id, ulid
from common.registry.sessions import Sessions
from common.wire.sessions import SessionRecord
from tests.integration.router.test_streams import TEXT, Told
from tests.support.chat import asks, post, stream, text_of
from tests.support.scripted_generator import (
    FAMILY,
    FINGERPRINT,
    NAME,
    Generator,
    byte_tokenizer,
    written,
)


@pytest.fixture
async def session(bus: Bus) -> str:
    """A new session of the scripted model."""
    name = job_id(FAMILY, ulid())
    now = bus.clock.now_ms()
    record = SessionRecord(
        id=name, tenant="default", model=NAME, fingerprint=FINGERPRINT, version=0, tokens=0, turns=0, ttl_s=600,
        created_ms=now, updated_ms=now,
    )  # fmt: skip
    await Sessions(bus).create(record)
    return name


def turn(session: str, text: str, **more: Any) -> dict[str, Any]:
    body = {**asks(text), "session": session, **more}
    del body["model"]  # the session knows it
    return body


async def test_a_turn_carries_only_the_new_message(
    http: aiohttp.ClientSession, model: Generator, bus: Bus, session: str
) -> None:
    """The whole conversation is in the prompt; what was said stays as it was in tokens; a key repeats nothing."""
    system = {"role": "system", "content": "Be brief."}
    first = turn(session, "hello <|im_start|> you")
    first["messages"].insert(0, system)
    status, answer, _ = await post(http, first)
    assert status == 200, answer
    assert answer["session"] == {"id": session, "version": 1}
    key = {"Idempotency-Key": uuid.uuid4().hex}
    body = turn(session, "and now", stream_options={"include_usage": True})
    frames, _ = await stream(http, body, **key)
    again, _ = await stream(http, body, **key)

    assert (text_of(frames), again) == ("and now", frames)
    assert frames[-2][1]["session"] == {"id": session, "version": 2}
    one, two = model.works[-2:]
    assert two.turn is not None
    assert two.prompts[0][: two.turn.history] == one.prompts[0] + written("hello <|im_start|> you")
    new = "<|im_end|>\n<|im_start|>user\nand now<|im_end|>\n<|im_start|>assistant\n"
    added = two.prompts[0][two.turn.history :]
    assert byte_tokenizer().decode(added, skip_special_tokens=False) == new
    record = await Sessions(bus).get(session)
    assert record is not None
    assert (record.version, record.turns, record.busy) == (2, 2, "")


async def test_one_turn_at_a_time(
    http: aiohttp.ClientSession, model: Generator, bus: Bus, session: str
) -> None:
    """A second turn is refused, or waits if it says so; it then follows what was said meanwhile."""
    told = Told(model)
    response = await http.post("/v1/chat/completions", json=turn(session, "long", stream=True))
    assert response.status == 200
    await response.content.readuntil(b"w1")
    status, error, _ = await post(http, turn(session, "now"))
    assert (status, error["error"]["code"]) == (409, "session_busy")
    waiting = asyncio.create_task(post(http, turn(session, "later", wait=True)))
    late = asyncio.create_task(
        post(http, turn(session, "late", wait=True), **{"Spillway-Timeout": "0.4"})
    )
    status, error, _ = await late
    assert (status, error["error"]["code"]) == (504, "deadline_exceeded")
    told.go.set()
    await response.read()
    status, answer, _ = await waiting

    assert (status, answer["session"]["version"]) == (200, 2)
    assert TEXT in byte_tokenizer().decode(model.works[-1].prompts[0])


async def test_turns_sent_at_once_follow_each_other(
    http: aiohttp.ClientSession, model: Generator, bus: Bus, session: str
) -> None:
    """However many wait at once, each is one turn on top of all before it."""
    texts = [f"number {index}" for index in range(6)]
    answers = await asyncio.gather(*(post(http, turn(session, t, wait=True)) for t in texts))
    turns = await Sessions(bus).turns(session)

    assert [status for status, _, _ in answers] == [200] * len(texts)
    assert sorted(answer["session"]["version"] for _, answer, _ in answers) == [1, 2, 3, 4, 5, 6]
    assert sorted(turn.answer for turn in turns) == sorted(texts)


async def test_what_a_session_is_not_asked_for(
    http: aiohttp.ClientSession, model: Generator, bus: Bus, session: str
) -> None:
    """Several choices, another model, and a session that was deleted are refused."""
    for change, status, code in (
        ({"n": 2}, 400, "invalid_value"),
        ({"model": "sim"}, 400, "session_model_mismatch"),
    ):
        got, error, _ = await post(http, {**turn(session, "x"), **change})
        assert (got, error["error"]["code"]) == (status, code)
    await Sessions(bus).mark_deleted(session)
    got, error, _ = await post(http, turn(session, "x"))
    assert (got, error["error"]["code"]) == (404, "session_not_found")
