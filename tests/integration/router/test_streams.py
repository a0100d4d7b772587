"""Streams of generations that break off, go on, are cancelled, fail, or meet a router that stops."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from common.errors import Conflict, InvalidRequest
from common.wire.results import Piece
from tests.support.chat import CHAT, asks, frames_of, post, stream, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import Generator, Scene

WORDS = [f"w{index} " for index in range(12)]
TEXT = "".join(WORDS)


class Told:
    """A script that says WORDS, the rest of them only when told to go on; it notes whether it was stopped."""

    def __init__(self, model: Generator, before: int = 4) -> None:
        self.go, self.over = asyncio.Event(), asyncio.Event()
        self.before, self.stopped, self.index = before, False, 0
        model.script = self.script

    async def script(self, scene: Scene) -> None:
        for index, word in enumerate(WORDS):
            self.index = index
            while index == self.before and not self.go.is_set() and not scene.stopped:
                scene.stopped = bool(await scene.consumer.outbox.emit([scene.lease]))
                await asyncio.sleep(0.02)
            await scene.text(word, finish="stop" if index == len(WORDS) - 1 else None)
        await scene.end()
        self.stopped = scene.stopped
        self.over.set()


async def begun(
    http: aiohttp.ClientSession, url: str = "", count: int = 5, resume: str = ""
) -> tuple[aiohttp.ClientResponse, list[tuple[str, Any]]]:
    """Open a stream, and read its first `count` frames."""
    headers = {"Spillway-Resume": resume} if resume else {}
    response = await http.post(f"{url}{CHAT}", json=asks(stream=True), headers=headers)
    assert response.status == 200, await response.text()
    found: list[tuple[str, Any]] = []
    while len(found) < count:
        found += frames_of(await response.content.readuntil(b"\n\n"))
    return response, found


async def rest(
    http: aiohttp.ClientSession, name: str, last: str, url: str = ""
) -> list[tuple[str, Any]]:
    """Read the events of a request after one id."""
    headers = {"Last-Event-ID": last} if last else {}
    async with http.get(f"{url}/v1/requests/{name}/events", headers=headers) as response:
        assert response.status == 200, await response.text()
        return frames_of(await response.read())


async def test_a_stream_goes_on_after_any_piece(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """Over folds, with two choices, by GET and by POST: what follows an id is the rest of the same stream."""

    async def script(scene: Scene) -> None:
        for index in range(6):
            for choice in range(2):
                end = "stop" if index == 5 else None
                piece = Piece(at=0, choice=choice, tokens=[65], text=f"{index}", finish=end)  # type: ignore[arg-type]
                await scene.say(piece, fold=(index, choice) in {(2, 1), (4, 0)})
        await scene.end()

    model.script = script
    key = {"Idempotency-Key": uuid.uuid4().hex}
    body = asks(n=2, stream_options={"include_usage": True})
    whole, headers = await stream(http, body, **key)
    name = headers["x-request-id"]

    assert [text_of(whole, choice) for choice in (0, 1)] == ["012345"] * 2
    assert await rest(http, name, "") == whole
    for at, (last, _) in enumerate(whole):
        if last:
            assert await rest(http, name, last) == whole[at + 1 :]
    last = whole[5][0]
    assert (await stream(http, body, **key, **{"Last-Event-ID": last}))[0] == whole[6:]
    async with http.get(f"/v1/requests/{name}") as response:
        state = await response.json()
    assert [c["message"]["content"] for c in state["result"]["choices"]] == ["012345"] * 2


async def test_who_may_go_on(http: aiohttp.ClientSession, model: Generator) -> None:
    """Last-Event-ID asks for a known request; a key means one body; what failed is asked anew."""
    status, error, _ = await post(http, asks(), **{"Last-Event-ID": "1.0"})
    assert (status, error["error"]["code"]) == (400, "invalid_header")
    key = {"Idempotency-Key": uuid.uuid4().hex}
    status, error, _ = await post(http, asks(), **key, **{"Last-Event-ID": "1.0"})
    assert (status, error["error"]["code"]) == (404, "request_not_found")
    status, error, _ = await post(http, asks(), **{"Last-Event-ID": "one"})
    assert (status, error["error"]["param"]) == (400, "Last-Event-ID")

    async def fails(scene: Scene) -> None:
        raise InvalidRequest("the worker says no", code="invalid_value")

    works, model.script = model.script, fails
    status, error, _ = await post(http, asks(), **key)
    assert (status, error["error"]["code"]) == (400, "invalid_value")
    model.script = works
    both = await asyncio.gather(post(http, asks(), **key), post(http, asks(), **key))
    assert both[0][:2] == both[1][:2]
    assert both[0][0] == 200
    status, error, _ = await post(http, asks("other"), **key)
    assert (status, error["error"]["code"]) == (409, "idempotency_conflict")


async def test_what_a_disconnect_does(http: aiohttp.ClientSession, model: Generator) -> None:
    """An attached stream is cancelled at once; a resumable one runs on, and ends when its grace is over."""
    told = Told(model)
    response, _ = await begun(http)
    response.close()
    async with asyncio.timeout(60):
        await told.over.wait()
    assert told.stopped

    told = Told(model)
    asking = asyncio.create_task(post(http, asks()))
    async with asyncio.timeout(60):
        while told.index < told.before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        asking.cancel()
        await told.over.wait()
    assert told.stopped

    told = Told(model)
    response, found = await begun(http, resume="60")
    name = response.headers["x-request-id"]
    response.close()
    told.go.set()
    found += await rest(http, name, found[-1][0])
    assert (text_of(found), told.stopped) == (TEXT, False)

    told = Told(model)
    response, _ = await begun(http, resume="0.3")
    response.close()
    async with asyncio.timeout(60):
        await told.over.wait()
    assert told.stopped


async def test_who_comes_back_and_leaves_again_holds_the_request(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """The grace counts anew from the last reader, and only when it has left."""
    told = Told(model)
    response, found = await begun(http, resume="0.5")
    name = response.headers["x-request-id"]
    response.close()
    again = await http.get(f"/v1/requests/{name}/events", headers={"Last-Event-ID": found[-1][0]})
    await asyncio.sleep(1.2)
    assert not told.over.is_set()
    again.close()
    async with asyncio.timeout(60):
        await told.over.wait()
    assert told.stopped


async def test_a_stream_ends_with_its_error(http: aiohttp.ClientSession, model: Generator) -> None:
    """Cancelled, failed or late in mid-stream: the last event says so, in OpenAI's shape, and there is no [DONE]."""
    told = Told(model)
    response, found = await begun(http)
    name = response.headers["x-request-id"]
    async with http.post(f"/v1/requests/{name}/cancel") as cancelled:
        assert (await cancelled.json())["cancelled"]
    last = frames_of(await response.read())
    assert [data["error"]["code"] for _, data in last] == ["cancelled"]
    assert (await rest(http, name, found[-1][0])) == last

    async def fails(scene: Scene) -> None:
        await scene.text("so far")
        raise Conflict("no further", code="session_deleted")

    model.script = fails
    frames, _ = await stream(http, asks())
    error = frames[-1][1]["error"]
    assert (text_of(frames), error["code"], error["status"]) == ("so far", "session_deleted", 409)
    told = Told(model)
    frames, _ = await stream(http, asks(), **{"Spillway-Timeout": "0.7"})
    assert frames[-1][1]["error"]["code"] == "deadline_exceeded"
    status, error, _ = await post(http, asks(), **{"Spillway-Timeout": "0.7"})
    assert (status, error["error"]["code"]) == (504, "deadline_exceeded")
    told.go.set()


async def test_a_busy_mesh_refuses_before_it_streams(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """A full lane is 429 with Retry-After for streams too; what no lane could hold is told apart."""
    told = Told(model, before=0)
    opened = [await begun(http, count=1) for _ in range(64)]
    async with http.post(CHAT, json=asks(stream=True)) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (429, "depth")
        assert int(response.headers["Retry-After"]) >= 1
    told.go.set()
    for response, _ in opened:
        assert text_of(frames_of(await response.read())) == TEXT
    body, code = {**asks(), "prompt": ["x"] * 65}, "depth"
    async with asyncio.timeout(60):
        while code == "depth":  # until the router has looked at what the lane holds at most
            status, error, _ = await post(http, body, "/v1/completions")
            code = error["error"]["code"]
    assert (status, code) == (422, "exceeds_depth")


@pytest.fixture
async def second(mesh: Mesh) -> AsyncIterator[Any]:
    """Another router of the mesh."""
    router = await asyncio.to_thread(mesh.add_router, f"r{uuid.uuid4().hex[:6]}")
    url = await asyncio.to_thread(mesh.address, router)
    yield router, url
    await asyncio.to_thread(router.stop)


async def test_a_killed_router_breaks_no_answer(
    http: aiohttp.ClientSession, model: Generator, second: Any
) -> None:
    """Its stream goes on at another router; what nobody comes back for ends with its grace."""
    router, url = second
    left = Told(model)
    gone, _ = await begun(http, url, resume="2")
    told = Told(model)
    response, found = await begun(http, url, resume="60")
    name = response.headers["x-request-id"]
    router.kill()
    with pytest.raises(aiohttp.ClientError):
        await response.read()
    following = asyncio.create_task(rest(http, name, found[-1][0]))
    await asyncio.sleep(0.2)
    told.go.set()
    found += await following

    assert [data for _, data in found].count("[DONE]") == 1
    assert (text_of(found), told.stopped) == (TEXT, False)
    ids = [name for name, _ in found if name]
    assert len(ids) == len(set(ids)) == len(WORDS)
    async with asyncio.timeout(60):
        await left.over.wait()
    assert left.stopped
    gone.close()


async def test_a_stopping_router_ends_its_streams_so_that_they_go_on(
    http: aiohttp.ClientSession, model: Generator, second: Any
) -> None:
    """Streams that end in time are whole; the others end with an error, and go on elsewhere."""
    router, url = second
    long = Told(model)
    slow, slow_found = await begun(http, url)
    short = Told(model)
    quick, quick_found = await begun(http, url)
    router.process.send_signal(signal.SIGTERM)
    short.go.set()
    quick_found += frames_of(await quick.read())
    slow_found += frames_of(await slow.read())

    assert text_of(quick_found) == TEXT
    assert slow_found[-1][1]["error"]["code"] == "draining"
    assert (await asyncio.to_thread(router.process.wait), long.over.is_set()) == (0, False)
    name, last = slow.headers["x-request-id"], slow_found[-2][0]
    long.go.set()
    assert text_of(slow_found[:-1] + await rest(http, name, last)) == TEXT


async def test_the_openai_client_works(mesh: Mesh, model: Generator) -> None:
    """Whole, streamed, with usage, completions, and its errors."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello there"}]
    answer = await client.chat.completions.create(model="scripted", messages=messages)
    assert answer.choices[0].message.content == "hello there"
    again: Any = [*messages, answer.choices[0].message.model_dump(), messages[0]]
    opened: Any = await client.chat.completions.create(
        model="scripted", messages=again, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in opened]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
    assert chunks[-1].usage.completion_tokens == 11
    done = await client.completions.create(model="scripted", prompt="<|im_start|>user\nyes", n=2)
    assert [choice.text for choice in done.choices] == ["yes"] * 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="scripted", messages=messages, temperature=9)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(model="nobody", messages=messages)

    async def fails(scene: Scene) -> None:
        await scene.text("so far")
        raise InvalidRequest("no further", code="invalid_value")

    model.script = fails
    opened = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
    with pytest.raises(openai.APIError, match="no further"):
        [chunk async for chunk in opened]
    await opened.close()
    await client.close()


async def test_the_openai_client_honours_a_refusal(
    mesh: Mesh, http: aiohttp.ClientSession, model: Generator
) -> None:
    """A 429's Retry-After is waited for, and the next try succeeds."""
    import openai

    told = Told(model, before=0)
    opened = [await begun(http, count=1) for _ in range(64)]
    waits: list[Any] = []

    async def note(response: Any) -> None:
        waits.append((response.status_code, response.headers.get("retry-after")))
        told.go.set()

    http_client = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    client = openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="unused", http_client=http_client, max_retries=9
    )
    answer = await client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "x"}]
    )
    assert answer.choices[0].message.content == TEXT
    assert (waits[0][0], waits[-1][0]) == (429, 200)
    assert int(waits[0][1]) >= 1
    await client.close()
    for response, _ in opened:
        response.close()


async def test_who_leaves_after_done_is_answered(mesh: Mesh, model: Generator) -> None:
    """Readers that reset their connection on seeing [DONE] are counted as answered (200), not as gone (499)."""
    router = await asyncio.to_thread(mesh.add_router, f"r{uuid.uuid4().hex[:6]}")
    url = await asyncio.to_thread(mesh.address, router)
    await asyncio.to_thread(mesh.wait_ready, url)
    body = json.dumps(asks(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(40):
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(head + body)
        assert (await reader.readuntil(b"data: [DONE]\n\n")).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
    counted: dict[str, float] = {}
    async with aiohttp.ClientSession() as session:
        while sum(counted.values()) < 40:
            async with session.get(
                f"http://127.0.0.1:{router.ports()['health_port']}/metrics"
            ) as got:
                lines = (await got.text()).splitlines()
            mine = [n for n in lines if n.startswith("spillway_requests_total{") and CHAT in n]
            counted = {n.split('status="')[1][:3]: float(n.rsplit(" ", 1)[1]) for n in mine}

    assert counted == {"200": 40}
    await asyncio.to_thread(router.stop)
