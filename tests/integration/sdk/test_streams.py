"""The SDK against real routers: no token lost, doubled or changed, whatever is cut or killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import spillway_client as sw
from hypothesis import given, settings
from hypothesis import strategies as st

from client.tests.generator import cutting
from tests.integration.sdk.conftest import TalkingMesh
from tests.support.waiting import until

CUTS = st.lists(st.tuples(st.integers(0, 6000), st.booleans()), max_size=3)
TOKENS = 40


@pytest.fixture
async def client(mesh: TalkingMesh) -> AsyncIterator[sw.AsyncSpillway]:
    """A client that knows both routers."""
    async with sw.AsyncSpillway(mesh.urls) as made:
        yield made


def _shown(chunk: sw.ChatChunk) -> list[tuple[int, str, str | None]]:
    return [(c.index, c.delta.content, c.finish_reason) for c in chunk.choices if c.delta.content]


def _texts(chunks: list[sw.ChatChunk], n: int) -> list[str]:
    parts = [part for chunk in chunks for part in _shown(chunk)]
    return ["".join(text for index, text, _ in parts if index == choice) for choice in range(n)]


@settings(max_examples=8, deadline=None)
@given(one=CUTS, two=CUTS, n=st.integers(1, 3))
async def test_cuts_at_any_byte(
    mesh: TalkingMesh, one: list[tuple[int, bool]], two: list[tuple[int, bool]], n: int
) -> None:
    """Connections to two routers are cut at any byte: the texts are those of the undisturbed answer, chunk ids rise."""
    async with sw.AsyncSpillway(mesh.url) as client:
        whole = await client.chat.completions.create("where?", n=n, max_tokens=TOKENS)
    async with (
        cutting(mesh.urls[0], one) as first,
        cutting(mesh.urls[1], two) as second,
        sw.AsyncSpillway([first.url, second.url], max_retries=10) as client,
    ):
        stream = await client.chat.completions.stream("where?", n=n, max_tokens=TOKENS)
        chunks = [chunk async for chunk in stream]
        joined = await stream.final()

    expected = [choice.message.content for choice in whole.choices]
    assert _texts(chunks, n) == expected
    assert [choice.message.content for choice in joined.choices] == expected
    assert [choice.finish_reason for choice in joined.choices] == ["length"] * n
    assert joined.usage == whole.usage
    ids = [tuple(map(int, c.event_id.split("."))) for c in chunks if c.event_id]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize("which", ["router", "router, grounded", "worker"])
async def test_kill_in_mid_stream(mesh: TalkingMesh, client: sw.AsyncSpillway, which: str) -> None:
    """kill -9 of the router that streams, or of the worker that generates: the same answer to the end."""
    options: sw.ChatOptions = {"max_tokens": 150}
    if "grounded" in which:
        await client.collections.create("seas")
        await client.documents("seas").add([{"id": "d", "text": "The North Sea is shallow."}])
        options["retrieval"] = {"collection": "seas", "k": 1}
    whole = await client.chat.completions.create("tell me", **options)
    process, killed = mesh.worker if which == "worker" else mesh.router, False
    stream = await client.chat.completions.stream("tell me", **options)
    async for _ in stream:
        if not killed and len(stream.text) > 40:
            killed = True
            await asyncio.to_thread(process.kill)
            process.start()
    joined = await stream.final()
    mesh.urls[0] = mesh.url = mesh.address(mesh.router)
    await asyncio.to_thread(mesh.wait_ready, mesh.url)

    assert killed
    assert (joined.text, joined.citations) == (whole.text, whole.citations)
    assert joined.usage.completion_tokens == whole.usage.completion_tokens
    assert joined.passages == whole.passages
    assert stream.resumed == (0 if which == "worker" else 1)


async def test_leaving_a_stream_ends_the_work(client: sw.AsyncSpillway) -> None:
    """A stream that is closed early is a cancelled request within a step."""
    async with await client.chat.completions.stream("tell me", max_tokens=5000) as stream:
        await anext(stream)

    async def cancelled() -> bool:
        return (await client.requests.get(stream.request_id or "")).state == "cancelled"

    await until(cancelled, "the request is cancelled")


async def test_sessions(client: sw.AsyncSpillway) -> None:
    """A conversation carries only what is new, survives export and import, and is gone when deleted."""
    made = await client.sessions.create(metadata={"who": "test"}, ttl_s=600)
    session = client.session(made.id)
    first = await session.chat("one", max_tokens=5)
    second = await (await session.stream("two", max_tokens=5)).final()
    assert first.session == {"id": made.id, "version": 1}
    assert second.session == {"id": made.id, "version": 2}
    assert second.usage.prompt_tokens > first.usage.prompt_tokens

    known = await session.get(include_messages=True)
    said = [message["content"] for message in known.messages or []]
    assert said == ["one", first.text, "two", second.text]
    assert (known.turns, known.metadata, known.ttl_s) == (2, {"who": "test"}, 600)
    assert (await client.sessions.update(made.id, ttl_s=60)).ttl_s == 60

    copy = await client.sessions.load(await session.export())
    assert copy.turns == 2
    found = {one.id async for one in client.sessions.iterate(page=1)}
    assert {made.id, copy.id} <= found
    for one in (made.id, copy.id):
        proof = await client.sessions.delete(one)
        assert proof.deleted
        assert proof.proof["stores"]
    with pytest.raises(sw.NotFoundError):
        await session.chat("three")


async def test_a_second_turn_at_once(client: sw.AsyncSpillway) -> None:
    """While a turn is answered another one is refused, or waits if told to."""
    session = client.session((await client.sessions.create()).id)
    async with await session.stream("one", max_tokens=60) as stream:
        await anext(stream)
        with pytest.raises(sw.ConflictError) as caught:
            await session.chat("two", max_tokens=5)
        assert caught.value.code == "session_busy"
        waiting = asyncio.create_task(session.chat("two", max_tokens=5, wait=True))
        await stream.final()
        answer = await waiting
    assert answer.session == {"id": session.id, "version": 2}


async def test_a_grounded_answer(mesh: TalkingMesh, client: sw.AsyncSpillway) -> None:
    """Passages come with the answer, streamed and whole; nothing found is said plainly."""
    await client.collections.create("rivers")
    await client.documents("rivers").add([{"id": "d", "text": "The Danube flows through Vienna."}])
    grounds = {"collection": "rivers", "k": 1, "include_passages": True}
    whole = await client.chat.completions.create("which?", retrieval=grounds, max_tokens=5)
    stream = await client.chat.completions.stream("which?", retrieval=grounds, max_tokens=5)
    streamed = await stream.final()

    for answer in (whole, streamed):
        assert [(p.index, p.document_id, p.text) for p in answer.passages] == [
            (1, "d", "The Danube flows through Vienna.")
        ]
        assert answer.retrieval is not None
        assert not answer.retrieval.approximate
    grounds |= {"precomputed": True}
    whole = await client.chat.completions.create("which?", retrieval=grounds, max_tokens=5)
    stream = await client.chat.completions.stream("which?", retrieval=grounds, max_tokens=5)
    streamed = await stream.final()
    assert [each.retrieval and each.retrieval.approximate for each in (whole, streamed)] == [
        True
    ] * 2
    await client.collections.create("empty")
    nothing = await client.chat.completions.create("which?", retrieval="empty")
    assert nothing.retrieval is not None
    assert nothing.retrieval.found == 0
    assert "No passage" in nothing.text


def test_blocking(mesh: TalkingMesh) -> None:
    """The blocking client does all of it from a plain thread."""
    with sw.Spillway(mesh.urls) as client:
        session = client.session(client.sessions.create().id)
        with session.stream("hello", max_tokens=8) as stream:
            assert "".join(stream.texts()) == stream.text == stream.final().text
        assert [one.id for one in client.sessions.iterate()].count(session.id) == 1
        assert session.delete().deleted
        assert client.completions.create("hello", max_tokens=4).text
        assert client.embeddings.create("hello").vectors[0]
