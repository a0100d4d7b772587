from __future__ import annotations

import array
import asyncio
import base64
import json
import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

import spillway_client as sw
from spillway_client import retry
from spillway_client.errors import class_for

if TYPE_CHECKING:
    from .conftest import Handler, Server

VECTOR = base64.b64encode(array.array("f", [0.5, -1.0]).tobytes()).decode()
EMBEDDED = {
    "object": "list",
    "model": "m",
    "data": [
        {"object": "embedding", "index": 1, "embedding": VECTOR},
        {"object": "embedding", "index": 0, "embedding": VECTOR},
    ],
    "usage": {"prompt_tokens": 3, "total_tokens": 3, "later": 1},
}


def says(status: int, payload: Any, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(payload, status=status, headers={"x-request-id": "r1", **named})

    return handler


def fails(status: int, code: str = "c", **headers: str) -> Handler:
    return says(status, {"error": {"message": "m", "type": "t", "code": code}}, **headers)


async def breaks(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def test_embeddings_in_input_order(server: Server) -> None:
    """Vectors come back decoded, in the order of the input, with usage, whatever the wire's order and extras."""
    server.answers = [says(200, EMBEDDED)]
    async with sw.AsyncSpillway(server.url) as client:
        result = await client.embeddings.create(["a", "b"], dimensions=2)

    assert result.vectors == [[0.5, -1.0], [0.5, -1.0]]
    assert [item.index for item in result.data] == [0, 1]
    assert (result.usage, result.request_id) == (sw.Usage(3, 3), "r1")
    assert json.loads(server.bodies[0]) == {
        "input": ["a", "b"],
        "encoding_format": "base64",
        "dimensions": 2,
    }


async def test_embeddings_as_bytes(server: Server) -> None:
    """`as_="bytes"` leaves the float32 bytes alone."""
    server.answers = [says(200, EMBEDDED)]
    async with sw.AsyncSpillway(server.url) as client:
        result = await client.embeddings.create("a", as_="bytes")

    assert result.vectors[0] == array.array("f", [0.5, -1.0]).tobytes()


async def test_headers(server: Server) -> None:
    """The key, the deadline and the wish to resume are sent; the deadline is just below the caller's."""
    server.answers = [says(200, EMBEDDED)]
    async with sw.AsyncSpillway(server.url, "sk-sw-1", timeout_s=20) as client:
        await client.embeddings.create("a")

    headers = server.seen[0].headers
    assert headers["Authorization"] == "Bearer sk-sw-1"
    assert headers["Spillway-Resume"] == "30"
    assert 18 < float(headers["Spillway-Timeout"]) < 20


@pytest.mark.parametrize("first", [fails(429), fails(503), fails(500), fails(408), breaks])
async def test_retry_attaches(server: Server, first: Handler) -> None:
    """A retried POST carries the same key and the same body, so the server can attach it to the first."""
    server.answers = [first, says(200, EMBEDDED)]
    async with sw.AsyncSpillway(server.url) as client:
        await client.embeddings.create("a")

    keys = {request.headers["Idempotency-Key"] for request in server.seen}
    assert (len(server.seen), len(keys), len(set(server.bodies))) == (2, 1, 1)


async def test_keys_differ_between_calls(server: Server) -> None:
    """Two calls never share an idempotency key, unless the caller gives it."""
    server.answers = [says(200, EMBEDDED)]
    async with sw.AsyncSpillway(server.url) as client:
        await client.embeddings.create("a")
        await client.embeddings.create("a")
        await client.embeddings.create("a", idempotency_key="mine")

    keys = [request.headers["Idempotency-Key"] for request in server.seen]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 422, 499])
async def test_facts_are_not_retried(server: Server, status: int) -> None:
    """What time does not change is raised at once, as its class, with everything the server said."""
    server.answers = [fails(status, "some_code")]
    async with sw.AsyncSpillway(server.url) as client:
        with pytest.raises(class_for(status)) as caught:
            await client.search("c", "text")

    error = caught.value
    assert len(server.seen) == 1
    assert (error.status_code, error.code, error.request_id) == (status, "some_code", "r1")


@pytest.mark.parametrize(
    ("answer", "tries"),
    [
        (fails(500, x_should_retry="false"), 1),
        (fails(409, x_should_retry="true", retry_after_ms="1"), 3),
        (fails(429, Retry_After="121"), 1),
        (fails(429, retry_after_ms="1"), 3),
    ],
)
async def test_the_server_decides(server: Server, answer: Handler, tries: int) -> None:
    """x-should-retry overrides the status, and nobody waits longer than two minutes."""
    server.answers = [answer]
    async with sw.AsyncSpillway(server.url) as client:
        with pytest.raises(sw.APIStatusError):
            await client.models.list()

    assert len(server.seen) == tries


async def test_retry_after_is_kept_in_the_error(server: Server) -> None:
    """The caller learns when to come back, and a wait beyond the deadline is not begun."""
    server.answers = [fails(429, Retry_After="60")]
    async with sw.AsyncSpillway(server.url, timeout_s=5) as client:
        with pytest.raises(sw.RateLimitError) as caught:
            await client.models.list()

    assert caught.value.retry_after_s == 60


def test_retry_after_forms() -> None:
    """Milliseconds win over seconds; dates are understood; nonsense is ignored."""
    now = datetime(2030, 1, 1, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=7), usegmt=True)

    assert retry.retry_after_s({"retry-after-ms": "1500", "Retry-After": "9"}) == 1.5
    assert retry.retry_after_s({"Retry-After": date}, now.timestamp()) == 7
    for odd in ("soon", "-1", "nan", "inf", ""):
        assert retry.retry_after_s({"Retry-After": odd}) is None


def test_delays() -> None:
    """Delays double from half a second to eight, less at most a quarter; a wish is never cut short."""
    assert [retry.delay_s(n, None, 0.0) for n in range(6)] == [0.5, 1, 2, 4, 8, 8]
    assert retry.delay_s(0, None, 0.999) >= 0.375
    assert 3 <= retry.delay_s(0, 3, 0.999) <= 3.3


async def test_deadline_covers_all_tries(server: Server) -> None:
    """A hung server costs the caller its timeout and no more; the error is a timeout and a connection error."""
    server.answers = [hangs]
    async with sw.AsyncSpillway(server.url, timeout_s=0.3, max_retries=5) as client:
        with pytest.raises(sw.APITimeoutError):
            await client.embeddings.create("a")

    assert len(server.seen) == 1
    assert issubclass(sw.APITimeoutError, sw.APIConnectionError)


async def test_unreachable() -> None:
    """A refused connection names the address."""
    async with sw.AsyncSpillway("http://127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(sw.APIConnectionError, match=r"127\.0\.0\.1:1"):
            await client.models.list()


async def test_cancellation_ends_the_work(server: Server) -> None:
    """Cancelling the task that waits closes the connection and tells the server which work to end."""
    server.answers = [hangs, says(200, {})]
    async with sw.AsyncSpillway(server.url) as client:
        task = asyncio.create_task(client.embeddings.create("a"))
        while not server.seen:  # noqa: ASYNC110 - the server has no event for "began"
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.gone.wait(), 60)

    key = server.seen[0].headers["Idempotency-Key"]
    assert server.seen[1].path == f"/v1/requests/{key}/cancel"


async def test_delete_whose_answer_was_lost(server: Server) -> None:
    """A delete that finds nothing after its first try broke has succeeded; otherwise 404 is 404."""
    server.answers = [breaks, fails(404)]
    async with sw.AsyncSpillway(server.url) as client:
        await client.collections.delete("c")
        with pytest.raises(sw.NotFoundError):
            await client.collections.delete("c")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_every_try_is_ours(server: Server, method: str) -> None:
    """When a kept connection breaks, a call with no retries left is sent once: aiohttp sends nothing on its own."""
    listed = says(200, {"object": "list", "data": []})
    server.answers = [listed, breaks, listed]
    async with sw.AsyncSpillway(server.url, max_retries=0) as client:
        await client.models.list()
        again = client.models.list() if method == "GET" else client.collections.delete("c")
        with pytest.raises(sw.APIConnectionError):
            await again

    assert [request.method for request in server.seen] == ["GET", method]


async def test_cut_body_is_retried(server: Server) -> None:
    """An answer that ends early is a broken connection, never half a result."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"object":')
        assert request.transport is not None
        request.transport.abort()
        return response

    server.answers = [half, says(200, {"object": "list", "data": []})]
    async with sw.AsyncSpillway(server.url) as client:
        assert await client.models.list() == []


@pytest.mark.parametrize("body", ["<html>", '{"data": 1}', "[]", ""])
async def test_not_a_spillway_server(server: Server, body: str) -> None:
    """An answer of something else is a SpillwayError, not a KeyError."""

    async def other(request: web.Request) -> web.Response:
        return web.Response(text=body)

    server.answers = [other]
    async with sw.AsyncSpillway(server.url) as client:
        with pytest.raises(sw.SpillwayError):
            await client.collections.list()


async def test_proxy_error_page(server: Server) -> None:
    """An error without our body keeps its text."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(status=502, text="Bad gateway")

    server.answers = [page]
    async with sw.AsyncSpillway(server.url, max_retries=0) as client:
        with pytest.raises(sw.InternalServerError, match="Bad gateway"):
            await client.models.list()


async def test_events_resume(server: Server) -> None:
    """A stream that breaks goes on after the last event seen."""

    async def first(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b': ping\n\nid: 0\nevent: progress\ndata: {"n": 1}\n\n')
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def second(request: web.Request) -> web.Response:
        return web.Response(
            text='id: 1\nevent: result\ndata: {"n":\ndata: 2}\n\n', content_type="text/event-stream"
        )

    server.answers = [first, second]
    async with sw.AsyncSpillway(server.url) as client:
        events = [event async for event in client.requests.events("r")]

    assert events == [
        sw.RequestEvent(0, "progress", {"n": 1}),
        sw.RequestEvent(1, "result", {"n": 2}),
    ]
    assert server.seen[1].headers["Last-Event-ID"] == "0"


async def test_iterate_pages(server: Server) -> None:
    """Iterating asks for page after page, and ids with slashes stay one segment."""
    server.answers = [
        says(200, {"data": [{"id": "a", "hash": "1"}], "has_more": True, "next": "c 1"}),
        says(200, {"data": [{"id": "b", "hash": "2"}], "has_more": False, "next": None}),
        says(200, {"id": "x/y", "hash": "3"}),
    ]
    async with sw.AsyncSpillway(server.url) as client:
        documents = client.documents("c")
        found = [d.id async for d in documents.iterate(filter={"a": 1}, include=["metadata"])]
        await documents.get("x/y")

    assert found == ["a", "b"]
    assert dict(server.seen[1].query) == {
        "limit": "500",
        "after": "c 1",
        "filter": '{"a": 1}',
        "include": "metadata",
    }
    assert server.seen[2].raw_path.endswith("/documents/x%2Fy")


async def test_search_shapes(server: Server) -> None:
    """One query gives one result, several give a list in their order."""
    hit = {"id": "d", "score": 0.5, "chunk": 1, "start": 2, "end": 3, "text": "t", "new": 1}
    rows = [{"index": 1, "data": []}, {"index": 0, "data": [hit]}]
    server.answers = [
        says(200, {"data": [hit], "path": "exact", "applied": "1-0"}),
        says(200, {"data": rows, "path": "exact", "applied": "1-0"}),
    ]
    async with sw.AsyncSpillway(server.url) as client:
        one = await client.search("c", vector=(1, 2), k=1, after="0-1")
        many = await client.search_many("c", ["a", "b"])

    expected = sw.Hit("d", 0.5, 1, 2, 3, "t")
    assert (one.data, one.path, one.applied) == ([expected], "exact", "1-0")
    assert [result.data for result in many] == [[expected], []]
    assert json.loads(server.bodies[0]) == {"vector": "AACAPwAAAEA=", "k": 1, "after": "0-1"}
    for request in server.seen:  # nobody asks for its outcome again, so the server need not keep it
        assert "Idempotency-Key" not in request.headers
        assert request.headers["Spillway-Resume"] == "0"


async def test_efforts_and_budgets(server: Server) -> None:
    """An effort or a time budget is sent; what was used is told, by servers that tell it."""
    report = {"kind": "graph", "effort": 48, "took_ms": 1.5, "budget_ms": 5, "fits": True, "new": 1}
    server.answers = [
        says(200, {"data": [], "path": "graph", "search": report}),
        says(200, {"data": [], "path": "exact"}),
    ]
    async with sw.AsyncSpillway(server.url) as client:
        within = await client.search("c", vector=[1.0], time_budget_ms=5)
        exact = await client.search("c", vector=[1.0], effort="exact")

    assert within.search == sw.SearchReport("graph", 48, 1.5, budget_ms=5, fits=True)
    assert exact.search is None
    assert json.loads(server.bodies[0])["time_budget_ms"] == 5
    assert json.loads(server.bodies[1])["effort"] == "exact"


async def test_explain_shapes(server: Server) -> None:
    """A collection's explanation has its shards, their efforts, and a filter's way where one was asked for."""
    effort = {"effort": 10, "recall": None, "path": "graph", "predicted_ms": 0.2}
    met = {"matching": 3, "selectivity": 0.5, "path": "filtered-exact", "effort": "exact"}
    shard = {"shard": 0, "kind": "graph", "why": "many", "live": 6, "newer": 0, "path": "graph"}
    shard |= {"effort": 10, "recall": 0.9, "recall_goal": 0.95, "bytes": {"rows": 1}}
    shards = [
        {**shard, "efforts": [effort], "filter": {**met, "predicted_ms": None, "why": "few"}},
        {**shard, "shard": 1, "efforts": [], "later": 1},
    ]
    told = {"object": "explanation", "collection": "c", "k": 3, "shards": shards}
    server.answers = [says(200, told)]
    async with sw.AsyncSpillway(server.url) as client:
        found = await client.collections.explain("c", k=3, filter={"a": 1})

    assert (found.collection, found.k, [s.shard for s in found.shards]) == ("c", 3, [0, 1])
    assert found.shards[0].efforts == [sw.EffortExplanation(10, None, "graph", 0.2)]
    assert found.shards[0].filter is not None
    assert found.shards[0].filter.matching == 3
    assert found.shards[1].filter is None
    assert dict(server.seen[0].query) == {"k": "3", "filter": '{"a": 1}'}


async def test_a_map_and_places_on_it(server: Server) -> None:
    """A map has its points; hits are placed on the map that the caller has."""
    point = {"id": "d", "chunk": 2, "x": 0.5, "y": -1.0, "title": "T", "new": 1}
    drawn = {"object": "map", "collection": "c", "basis": "AAAA", "pending": False, "rows": 9}
    server.answers = [
        says(202, {**drawn, "basis": None, "pending": True, "rows": 0, "points": []}),
        says(200, {**drawn, "computed_at": 5.5, "explained": 0.4, "points": [point]}),
        says(200, {"object": "list", "basis": "AAAA", "pending": False, "data": [point]}),
        says(200, {"object": "list", "basis": "AAAA", "data": [{"x": 1.0, "y": 2.0}]}),
    ]
    async with sw.AsyncSpillway(server.url) as client:
        early = await client.collections.map("c")
        found = await client.collections.map("c", sample=7)
        hit = sw.Hit("d", 0.9, 2)
        placed = await client.collections.place("c", hits=[hit], basis=found.basis)
        free = await client.collections.place("c", vector=[1.0])

    expected = sw.MapPoint(0.5, -1.0, "d", 2, "T")
    assert (early.pending, early.points, early.basis) == (True, [], None)
    assert (found.points, found.rows, found.computed_at) == ([expected], 9, 5.5)
    assert dict(server.seen[1].query) == {"sample": "7"}
    assert placed.data == [expected]
    assert json.loads(server.bodies[2]) == {"hits": [{"id": "d", "chunk": 2}], "basis": "AAAA"}
    assert free.data == [sw.MapPoint(1.0, 2.0)]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.embeddings.create([]),
        lambda c: c.embeddings.create("a", as_="floats"),
        lambda c: c.search("c", vector=[float("nan")]),
        lambda c: c.search("c", vector=[float("inf")]),
        lambda c: c.search("c"),
        lambda c: c.search("c", "t", vector=[1.0]),
        lambda c: c.search("", "t"),
        lambda c: c.rerank("q", []),
        lambda c: c.documents("c").add([]),
        lambda c: c.documents("c").add([{"text": "t", "metadata": {"x": object()}}]),
        lambda c: c.models.list(timeout_s=0),
        lambda c: c.models.list(timeout_s=float("nan")),
    ],
)
async def test_refused_here(server: Server, call: Any) -> None:
    """What no server could accept is an InvalidInputError (a ValueError), and nothing is sent."""
    async with sw.AsyncSpillway(server.url) as client:
        with pytest.raises(sw.InvalidInputError):
            await call(client)

    assert server.seen == []
    assert issubclass(sw.InvalidInputError, ValueError)


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8080", "http://", "nonsense"])
def test_bad_address(url: str) -> None:
    """A wrong address is refused with what is expected."""
    with pytest.raises(sw.InvalidInputError, match="expected http"):
        sw.AsyncSpillway(url)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPILLWAY_URL is used where no address is given; a trailing /v1 of other SDKs is understood."""
    monkeypatch.setenv("SPILLWAY_URL", "http://example.test:9/v1/")
    assert sw.AsyncSpillway().base_url == "http://example.test:9"
    assert (
        sw.AsyncSpillway("http://other", ssl=ssl.create_default_context()).base_url
        == "http://other"
    )
