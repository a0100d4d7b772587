"""Grounded requests killed or cancelled between their stages: another process goes on, no stage's job twice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.router.test_grounding import DOCUMENTS, cite, grounded, new_session
from tests.support.chat import frames_of, post, stored, stream, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import NAME, Generator, Scene, generator

ANSWER = "It is Oskari [1]; see [1, 2] and [7]."


@pytest.fixture(scope="module")
def own() -> Iterator[Mesh]:
    """A mesh that this module may kill parts of."""
    made = Mesh()
    yield made
    made.close()


@pytest.fixture
async def http(own: Mesh) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(own.url, timeout=timeout) as session:
        yield session


@pytest.fixture
async def model(own: Mesh, http: aiohttp.ClientSession) -> AsyncIterator[Generator]:
    async with generator(own.redis.url, own.directory) as made:
        async with asyncio.timeout(60):
            while (await _get(http, f"/v1/models/{NAME}"))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield made


@pytest.fixture
async def pages(http: aiohttp.ClientSession) -> str:
    return await stored(http, DOCUMENTS)


async def _get(http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with http.get(path) as response:
        return response.status, await response.json()


def jobs(mesh: Mesh, stage: str) -> dict[str, str]:
    """Return job -> state of all jobs of one stage."""
    with mesh.redis.client() as client:
        found = {
            key.decode().split(":job:")[1]: (client.hget(key, "state") or b"").decode()
            for key in client.scan_iter("*:job:*")
        }
    return {name: state for name, state in found.items() if f".{stage}." in name}


async def fresh(mesh: Mesh, stage: str, before: set[str]) -> str:
    """Return the job of a stage that was not there before, as soon as there is one."""
    async with asyncio.timeout(60):
        while not (new := set(jobs(mesh, stage)) - before):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return new.pop()


async def over(http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    """Return a request's state once it is over."""
    async with asyncio.timeout(60):
        while True:
            _, state = await _get(http, f"/v1/requests/{name}")
            if state.get("state") not in {"queued", "running"}:
                return dict(state)
            await asyncio.sleep(0.1)


async def test_a_killed_routers_requests_go_on_from_their_stages(
    own: Mesh, http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """One request in each stage when their router is killed: another finishes all, every stage's job exists once.

    The one whose client read a stream is read on at the other router: nothing lost, nothing twice.
    """
    other = own.add_router(uuid.uuid4().hex[:6])
    url, go = own.address(other), asyncio.Event()
    own.wait_ready(url)

    async def waits(scene: Scene) -> None:
        if scene.index == 0:
            await scene.text("It is Oskari [")
        await go.wait()
        for text in ("1", "]; see [1, 2", "] and [7]."):
            await scene.text(text, finish="stop" if text.endswith("].") else None)
        await scene.end()

    model.script = waits
    keys = [uuid.uuid4().hex for _ in range(3)]
    sessions = [await new_session(http) for _ in keys]
    bodies = [{**grounded(pages, session=session), "stream": True} for session in sessions]
    headers = [{"Idempotency-Key": key, "Spillway-Resume": "60"} for key in keys]
    asked: list[asyncio.Task[Any]] = []
    async with aiohttp.ClientSession(url) as doomed:
        generating = await doomed.post("/v1/chat/completions", json=bodies[0], headers=headers[0])
        head = b""
        while b"Oskari" not in head:
            head += await generating.content.readany()
        try:
            own.search.halt()
            before = set(jobs(own, "search"))
            asked.append(asyncio.create_task(post(doomed, bodies[1], **headers[1])))
            await fresh(own, "search", before)
            own.worker.halt()
            before = set(jobs(own, "embed"))
            asked.append(asyncio.create_task(post(doomed, bodies[2], **headers[2])))
            await fresh(own, "embed", before)
            other.kill()
        finally:
            own.search.wake()
            own.worker.wake()
        await asyncio.gather(*asked, return_exceptions=True)
        generating.close()
    go.set()
    states = [await over(http, key) for key in keys]
    last = frames_of(head)[-1][0]
    name = generating.headers["x-request-id"]
    async with http.get(f"/v1/requests/{name}/events", headers={"Last-Event-ID": last}) as late:
        rest = frames_of(await late.read())

    for state in states:
        message = state["result"]["choices"][0]["message"]
        assert message["content"] == ANSWER
        assert [c["document_id"] for c in message["citations"]][:2] == ["velmora.md"] * 2
        assert state["attempts"] >= 2  # a busy machine may take a request from the second, too
    assert text_of(frames_of(head)) + text_of(rest) == ANSWER
    ours = {state["id"].rsplit("~", 1)[1] for state in states}
    for stage in ("embed", "search", "generate"):
        made = [job for job in jobs(own, stage) if job.rsplit("~", 1)[1].split(".")[0] in ours]
        assert len(made) == 3
    assert len(model.works) == 3
    for session in sessions:
        _, kept = await _get(http, f"/v1/sessions/{session}?include=messages")
        assert (kept["version"], [m["role"] for m in kept["messages"]]) == (
            1,
            ["user", "assistant"],
        )


async def test_a_router_killed_around_a_rewriting(
    own: Mesh, http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """One request whose question is being rewritten, one whose rewritten question is about to be searched for.

    Another router finishes both by the questions that were written before, and no question is rewritten twice.
    """
    other = own.add_router(uuid.uuid4().hex[:6])
    url, go, rewriting = own.address(other), asyncio.Event(), asyncio.Event()
    own.wait_ready(url)

    async def writes(scene: Scene) -> None:
        if "Rewritten question:" not in scene.asked():
            await cite(scene)
            return
        if "slowly" in scene.asked():
            rewriting.set()
            await go.wait()
        await scene.text(DOCUMENTS["tun.md"], finish="stop")
        await scene.end()

    model.script = writes
    keys = [uuid.uuid4().hex for _ in range(2)]
    asked: list[asyncio.Task[Any]] = []
    async with aiohttp.ClientSession(url) as doomed:
        own.worker.halt()
        try:
            before = set(jobs(own, "embed"))
            for key, said in zip(keys, ("slowly", "at once"), strict=True):
                body = grounded(pages, "And its river?", retrieval={"k": 1, "rewrite": True})
                earlier = [
                    {"role": "user", "content": f"Tell me of Tun {said}."},
                    {"role": "assistant", "content": "Tun is a town."},
                ]
                body["messages"] = [*earlier, *body["messages"]]
                headers = {"Idempotency-Key": key}
                asked.append(asyncio.create_task(post(doomed, body, **headers)))
            await rewriting.wait()
            await fresh(own, "embed", before)
            other.kill()
        finally:
            own.worker.wake()
        await asyncio.gather(*asked, return_exceptions=True)
    go.set()
    states = [await over(http, key) for key in keys]

    for state in states:
        retrieval = state["result"]["retrieval"]
        assert state["attempts"] >= 2  # a busy machine may take a request from the second, too
        assert retrieval["rewrite"]["query"] == DOCUMENTS["tun.md"]
        assert [row["document_id"] for row in retrieval["passages"]] == ["tun.md"]
    ours = {state["id"].rsplit("~", 1)[1] for state in states}
    for stage in ("rewrite", "embed", "search", "generate"):
        made = [job for job in jobs(own, stage) if job.rsplit("~", 1)[1].split(".")[0] in ours]
        assert len(made) == 2
    assert len(model.works) == 4


async def test_a_deadline_covers_all_stages(
    own: Mesh, http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """504 where it passes before a stream's head was due, an error in mid-stream where it passes later."""
    with own.search.halted():
        early, late = await asyncio.gather(
            post(http, {**grounded(pages), "stream": True}, **{"Spillway-Timeout": "0.8"}),
            stream(http, grounded(pages), **{"Spillway-Timeout": "10"}),
        )

    assert (early[0], early[1]["error"]["code"]) == (504, "deadline_exceeded")
    assert [data["error"]["code"] for _, data in late[0]] == ["deadline_exceeded"]
    assert not model.works


async def test_a_killed_worker_between_stages_costs_time_only(
    own: Mesh, http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """The encoder and the search are killed with a stage's job in their hands; what replaces them finishes it."""
    model.script = cite
    for process, stage in ((own.worker, "embed"), (own.search, "search")):
        process.halt()
        before = set(jobs(own, stage))
        asked = asyncio.create_task(post(http, grounded(pages)))
        await fresh(own, stage, before)
        await asyncio.to_thread(process.kill)
        process.start()
        status, answer, _ = await asked

        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("stage", ["embed", "search", "generate"])
@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_cancel_reaches_the_running_stage(
    own: Mesh, http: aiohttp.ClientSession, model: Generator, pages: str, stage: str, how: str
) -> None:
    """A cancelled or abandoned request ends its stage's job, and no later stage begins."""
    stopped = asyncio.Event()

    async def talks(scene: Scene) -> None:
        while not scene.stopped:
            await scene.text("on and ")
            await asyncio.sleep(0.02)
        stopped.set()

    model.script = talks
    process = {"embed": own.worker, "search": own.search}.get(stage)
    before = {name: set(jobs(own, name)) for name in ("embed", "search", "generate")}
    if process is not None:
        process.halt()
    try:
        asked = asyncio.create_task(post(http, grounded(pages)))
        job = await fresh(own, stage, before[stage])
        name = f"request~0~{job.rsplit('~', 1)[1].split('.')[0]}"
        if how == "cancel":
            status, answer, _ = await post(http, {}, f"/v1/requests/{name}/cancel")
            assert (status, answer["cancelled"]) == (200, True)
            status, error, _ = await asked
            assert (status, error["error"]["code"]) == (499, "cancelled")
        else:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await over(http, name)  # set free before, the stage could end before it is stopped
    finally:
        if process is not None:
            process.wake()
    state = await over(http, name)
    if stage == "generate":
        async with asyncio.timeout(60):
            await stopped.wait()
    async with asyncio.timeout(60):
        while jobs(own, stage).get(job) in {"queued", "running"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    assert state["state"] == "cancelled"
    later = {"embed": ("search", "generate"), "search": ("generate",), "generate": ()}[stage]
    assert all(set(jobs(own, name)) <= before[name] for name in later)  # delivered ones lapse
