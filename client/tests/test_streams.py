"""Streams: the same chunks whatever happens to the connection; errors, leaving early, and what is built of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import spillway_client as sw
from spillway_client import _stream, retry
from spillway_client._sse import Frame, Parser

from .conftest import Server
from .generator import Generator, Piece, cutting, serving

PIECES: list[Piece] = [
    (0, 0, "Die Fähre", None),
    (0, 1, "The", None),
    (1, 0, " nach 東京", None),
    (1, 1, " ferry", "length"),
    (2, 0, ' fährt "heute"', None),
    (4, 0, "\n\n[1].", "stop"),
]
# Two retrievals while it is written, each told before the piece of this number.
RETRIEVED = {
    number: {
        "collection": "c",
        "found": 1,
        "passages": [{"index": index, "document_id": f"d{index}"}],
        "retrievals": [{"at_token": number, "passages": [index], "replaced": [index - 1]}],
    }
    for number, index in ((2, 2), (4, 3))
}
CUTS = st.lists(st.tuples(st.integers(0, 2600), st.booleans()), max_size=6)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for long between two tries."""
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(_stream, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(_stream, "SPREAD_S", 0.0)


@pytest.fixture
async def generator() -> AsyncIterator[Generator]:
    """A server that answers every chat with PIECES."""
    async with serving(Generator(PIECES, RETRIEVED)) as made:
        yield made


async def _read(stream: sw.ChatStream) -> list[sw.ChatChunk]:
    return [chunk async for chunk in stream]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=CUTS, second=CUTS)
@example(cuts=[(0, True)] * 3, second=[])
@example(cuts=[(10**6, False)], second=[])
async def test_cuts_change_nothing(
    cuts: list[tuple[int, bool]], second: list[tuple[int, bool]]
) -> None:
    """Connections cut at any byte, at two routers, by FIN or RST: the undisturbed chunks, and one generation."""
    async with serving(Generator(PIECES, RETRIEVED)) as generator:
        async with sw.AsyncSpillway(generator.url) as client:
            expected = await _read(await client.chat.completions.stream("where?", n=2))
        generator.requests.clear()
        async with (
            cutting(generator.url, cuts) as one,
            cutting(generator.url, second) as two,
            sw.AsyncSpillway([one.url, two.url], max_retries=20) as client,
        ):
            stream = await client.chat.completions.stream("where?", n=2)
            chunks = await _read(stream)
            whole = await stream.final()

    assert chunks == expected
    assert [choice.message.content for choice in whole.choices] == [
        'Die Fähre nach 東京 fährt "heute"\n\n[1].',
        "The ferry",
    ]
    assert len(generator.requests) == 1
    assert generator.cancelled == []


@given(
    sizes=st.lists(st.integers(1, 40), max_size=40),
    fields=st.lists(
        st.tuples(st.sampled_from(["data", "id", "event", "", "x"]), st.text(max_size=12)),
        max_size=12,
    ),
    crlf=st.booleans(),
)
def test_frames_do_not_depend_on_how_they_arrive(
    sizes: list[int], fields: list[tuple[str, str]], crlf: bool
) -> None:
    """Any cutting of the bytes into pieces gives the frames of the whole."""
    end = "\r\n" if crlf else "\n"
    lines = [f"{name}: {value}{end}{end if name == 'data' else ''}" for name, value in fields]
    data = "".join(lines).encode()
    whole = Parser().feed(data)

    parser, found, at = Parser(), [], 0
    for size in [*sizes, len(data)]:
        found += parser.feed(data[at : at + size])
        at += size

    assert found == whole


def test_frames() -> None:
    """Comments are nothing, data lines are joined, an unfinished frame is not given."""
    text = b": ping\n\nid: 1.0\nevent: e\ndata: a\ndata: b\n\ndata:c\n\ndata: lost"
    assert Parser().feed(text) == [Frame("a\nb", "e", "1.0"), Frame("c", "message", None)]


async def test_the_whole_of_a_stream(generator: Generator) -> None:
    """`final` has text, citations, finish reasons, retrieval and usage; the usage chunk is not a chunk."""
    async with sw.AsyncSpillway(generator.url) as client:
        stream = await client.chat.completions.create("hi", stream=True, retrieval="c", seed=3)
        chunks = await _read(stream)
        whole = await stream.final()

    assert all(chunk.choices for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == whole.text == stream.text
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "length"]
    assert whole.citations == [sw.Citation(1, "d", 3, 9, (0, 3))]
    assert whole.passages == [sw.Passage(1, "d"), sw.Passage(2, "d2"), sw.Passage(3, "d3")]
    assert whole.retrieval == stream.retrieval
    assert whole.retrieval is not None
    told = [(one.at_token, one.passages, one.replaced) for one in whole.retrieval.retrievals]
    assert told == [(2, [2], [1]), (4, [3], [2])]
    assert (whole.usage.prompt_tokens, stream.usage) == (7, whole.usage)
    assert whole.session == {"version": 3}
    assert generator.bodies[0] == {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "retrieval": {"collection": "c"},
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, sw.NotFoundError),
        (409, sw.ConflictError),
        (429, sw.RateLimitError),
        (499, sw.CancelledRequestError),
        (503, sw.UnavailableError),
        (504, sw.DeadlineExceededError),
        (None, sw.InternalServerError),
    ],
)
async def test_an_error_in_mid_stream(status: int | None, kind: type[sw.APIStatusError]) -> None:
    """It is raised as its status' class after the chunks before it, and again by whoever reads on."""
    error = {"message": "m", "type": "t", "code": "c", "status": status}
    async with (
        serving(Generator(PIECES, error=error, error_after=3)) as generator,
        sw.AsyncSpillway(generator.url) as client,
        await client.chat.completions.stream("hi") as stream,
    ):
        with pytest.raises(kind) as caught:
            await _read(stream)
        with pytest.raises(kind):
            await stream.final()

    assert stream.text == "Die Fähre nach 東京"
    assert type(caught.value) is kind
    assert caught.value.status_code == status or status is None
    assert (caught.value.code, caught.value.request_id) == ("c", stream.request_id)
    assert generator.cancelled == []


async def test_leaving_early_cancels(generator: Generator) -> None:
    """Leaving `async with` before the end ends the work at the server; at the end there is nothing to cancel."""
    async with sw.AsyncSpillway(generator.url) as client:
        async with await client.chat.completions.stream("hi") as stream:
            await anext(stream)
        assert generator.cancelled == [stream.request_id]
        assert await _read(stream) == []

        async with await client.chat.completions.stream("hi") as stream:
            await stream.final()
        assert len(generator.cancelled) == 1


async def test_a_dropped_stream_is_cancelled(generator: Generator) -> None:
    """`break` without `async with` ends the work as soon as the stream is dropped; closing the client ends the rest."""
    async with sw.AsyncSpillway(generator.url) as client:
        async for _ in await client.chat.completions.stream("hi"):
            break
        kept = await client.chat.completions.stream("hi")

    assert generator.cancelled == ["chat.m~0~0", kept.request_id]


async def test_cancelling_the_reader_cancels(generator: Generator) -> None:
    """A cancelled task ends its stream at the server, and the stream never looks like one that ended well."""
    generator.endless = True
    async with sw.AsyncSpillway(generator.url) as client:
        stream = await client.chat.completions.stream("hi")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_read(stream), 0.2)
        with pytest.raises(sw.APIConnectionError, match="cancellation"):
            await anext(stream)

    assert generator.cancelled == [stream.request_id]


async def test_another_process_goes_on(generator: Generator) -> None:
    """`resume` reads the rest by the request's id and the last chunk's."""
    async with sw.AsyncSpillway(generator.url) as client:
        stream = await client.chat.completions.stream("hi")
        async for chunk in stream:
            if chunk.event_id == "1.0":
                break
        stream.detach()
        rest = await client.chat.completions.resume(
            stream.request_id or "", last_event_id=stream.last_event_id
        )
        again = await client.chat.completions.resume(stream.request_id or "")

        assert (await rest.final()).text == ' fährt "heute"\n\n[1].'
        assert (await again.final()).text.startswith("Die Fähre")
        with pytest.raises(sw.NotFoundError):
            await client.chat.completions.resume("chat.m~0~none")


async def test_it_gives_up_with_the_server(generator: Generator) -> None:
    """A router that stays away is waited for as long as the request would be; then the break is raised."""
    generator.endless = True
    async with (
        cutting(generator.url, [(2000, False)] + [(0, False)] * 10**5) as cutter,
        sw.AsyncSpillway(cutter.url, resume_s=0.5) as client,
    ):
        stream = await client.chat.completions.stream("hi")
        with pytest.raises(sw.APIConnectionError):
            await _read(stream)

    assert cutter.connections > 2


async def test_without_resume_a_break_is_an_error(generator: Generator) -> None:
    """`resume_s=0` asks the server to end the work with the connection, so nothing is there to go on with."""
    async with (
        cutting(generator.url, [(1500, False)]) as cutter,
        sw.AsyncSpillway(cutter.url, resume_s=0) as client,
    ):
        with pytest.raises(sw.APIConnectionError):
            await (await client.chat.completions.stream("hi")).final()

    assert cutter.connections == 1


async def test_a_deadline_ends_it(generator: Generator) -> None:
    """`timeout_s` covers the whole stream."""
    generator.endless = True
    async with sw.AsyncSpillway(generator.url) as client:
        stream = await client.chat.completions.stream("hi", timeout_s=0.5)
        with pytest.raises(sw.APITimeoutError):
            await _read(stream)


async def test_not_a_stream(server: Server) -> None:
    """A server that answers JSON where a stream was asked for is told apart."""

    async def other(request: web.Request) -> web.Response:
        return web.json_response({})

    server.answers = [other]
    async with sw.AsyncSpillway(server.url) as client:
        with pytest.raises(sw.UnexpectedResponseError, match="event stream"):
            await client.chat.completions.stream("hi")


async def test_another_router_is_asked(generator: Generator) -> None:
    """With several addresses a call goes on at once at one that answers, and stays there."""
    nowhere = "http://127.0.0.1:1"
    async with sw.AsyncSpillway([nowhere, generator.url], max_retries=0) as client:
        assert (await (await client.chat.completions.stream("hi")).final()).text
        assert client.base_url == generator.url
    async with sw.AsyncSpillway(f"{nowhere}, {generator.url}/v1", max_retries=0) as client:
        assert (await client.requests.cancel("x")).state == "cancelled"


def test_reconnect_delays() -> None:
    """At once but for a spread, then doubling to two seconds, less at most a quarter."""
    delays = [_stream.reconnect_delay_s(n, 0.0) for n in range(14)]
    assert delays == sorted(delays)
    assert delays[-1] <= _stream.MAX_DELAY_S
    assert _stream.reconnect_delay_s(13, 0.999) > 0.74 * delays[-1]
