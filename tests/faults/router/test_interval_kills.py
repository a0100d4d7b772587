"""Answers whose passages are found anew while they are written, killed at each place: nothing differs from undisturbed.

The sim device's text is a function of its prompt, so an answer equals the undisturbed one only if every replacement of
its passages took effect after the same token.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import aiohttp
import pytest

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.ids import Family
from common.wire.message import BadMessage, decode
from common.wire.registry import WorkerRecord
from common.wire.results import Delta, Event
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from tests.faults.router.test_grounding_kills import jobs, over
from tests.integration.router.test_interval_retrieval import DOCUMENTS, grounded
from tests.support.chat import post, stored
from tests.support.mesh import Mesh, Process
from tests.support.waiting import until

TOGETHER, RETRIEVALS = 3, 4
STEP_S = 0.01


class Writing(Mesh):
    """A mesh whose generator takes its time."""

    def _start(self) -> None:
        super()._start()
        self.generator = self.add_generator(STEP_S)


@pytest.fixture(scope="module")
def own() -> Iterator[Writing]:
    """A mesh that this module may kill parts of."""
    made = Writing()
    yield made
    made.close()


@pytest.fixture
async def http(own: Writing) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(own.url, timeout=timeout) as session:
        yield session


@pytest.fixture
async def pages(http: aiohttp.ClientSession) -> str:
    return await stored(http, DOCUMENTS)


def asked(pages: str, number: int) -> dict[str, Any]:
    """Return one of the questions, each with an answer and retrievals of its own."""
    message = {"role": "user", "content": f"What does number {number} say, and what comes after?"}
    return {**grounded(pages, retrieval={"include_passages": False}), "messages": [message]}


def told(answer: dict[str, Any]) -> Any:
    """Return what must not differ: the text, its citations, the passages, and what replaced what after which token."""
    message, retrieval = answer["choices"][0]["message"], answer["retrieval"]
    records = [
        [each[key] for key in ("at_token", "query_at", "found", "passages", "replaced")]
        for each in retrieval["retrievals"]
    ]
    return message["content"], message["citations"], retrieval["passages"], records


def replaced(mesh: Mesh) -> dict[str, int]:
    """Return how many replacements the log of each generate job holds."""
    found: dict[str, int] = {}
    with mesh.redis.client() as client:
        for key in client.scan_iter("*:log:chat.*"):
            log = cast("list[bytes]", client.lrange(key, 0, -1))
            events = [_delta(raw) for raw in log]
            found[key.decode().split(":log:")[1]] = sum(len(one.applied) for one in events if one)
    return found


def _delta(raw: bytes) -> Delta | None:
    event = decode(raw, Event)
    try:
        return decode(event.data, Delta) if event.kind == "progress" else None
    except BadMessage:
        return None


async def asking(
    url: str, bodies: list[dict[str, Any]]
) -> tuple[list[str], list[asyncio.Task[Any]], aiohttp.ClientSession]:
    """Ask all at one router, so that each goes on when that router is gone; return keys and tasks."""
    keys = [uuid.uuid4().hex for _ in bodies]
    session = aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=100))
    headers = [{"Idempotency-Key": key, "Spillway-Resume": "90"} for key in keys]
    tasks = [
        asyncio.create_task(post(session, body, **each))
        for body, each in zip(bodies, headers, strict=True)
    ]
    return keys, tasks, session


async def undisturbed(http: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> list[Any]:
    answers = []
    for body in bodies:
        status, answer, _ = await post(http, body)
        assert status == 200, answer
        assert len(answer["retrieval"]["retrievals"]) == RETRIEVALS + 1
        answers.append(told(answer))
    assert any(record[4] for _, _, _, records in answers for record in records)
    return answers


def between(mesh: Mesh, before: set[str], count: int) -> Callable[[], bool]:
    """Return whether all new answers have had so many replacements, and none is over."""

    def ready() -> bool:
        fresh = {job: n for job, n in replaced(mesh).items() if job not in before}
        return len(fresh) == TOGETHER and min(fresh.values()) >= count

    return ready


# After so many replacements in each answer; the last search is over by the third.
KILLS = [
    *itertools.product(["router", "gpu_worker"], range(1, RETRIEVALS)),
    *itertools.product(["vector_search"], range(1, RETRIEVALS - 1)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("victim", "after"), KILLS)
async def test_a_death_changes_no_token_and_no_citation(
    own: Writing, http: aiohttp.ClientSession, pages: str, victim: str, after: int
) -> None:
    """The router dies between two retrievals, the search during one, the generator after a replacement."""
    bodies = [asked(pages, number) for number in range(TOGETHER)]
    known = await undisturbed(http, bodies)
    before = set(replaced(own))
    other: Process | None = None
    url = own.url
    if victim == "router":
        other = own.add_router(uuid.uuid4().hex[:6])
        url = own.address(other)
        own.wait_ready(url)
        own.wait_generator(url, "sim-chat")
    keys, tasks, session = await asking(url, bodies)
    await until(between(own, before, after), f"{after} replacements in each answer")
    if other is not None:
        await asyncio.to_thread(other.kill)
    elif victim == "gpu_worker":
        await asyncio.to_thread(own.generator.kill)
        own.generator.start()
    else:
        own.search.halt()
        await until(lambda: _searching(own) or all(task.done() for task in tasks))
        await asyncio.to_thread(own.search.kill)
        own.search.start()
    states = [await over(http, key) for key in keys]
    await asyncio.gather(*tasks, return_exceptions=True)
    await session.close()

    assert [state["state"] for state in states] == ["result"] * TOGETHER
    assert [told(state["result"]) for state in states] == known


def _searching(mesh: Mesh) -> bool:
    """Return whether the search of some later retrieval is queued or running."""
    names = [f"r{letter}search" for letter in "bcde"]
    found = {job: state for name in names for job, state in jobs(mesh, name).items()}
    return any(state in {"queued", "running"} for state in found.values())


async def test_a_search_that_stands_still_holds_or_does_not(
    own: Writing, http: aiohttp.ClientSession, pages: str
) -> None:
    """With `keep` an answer ends on the passages it has; with `wait` it goes on when the search does."""
    body = asked(pages, 9)
    before = set(replaced(own))
    kept = {**body, "retrieval": {**body["retrieval"], "late": "keep"}}
    keys, tasks, session = await asking(own.url, [kept, body])
    await until(lambda: len(set(replaced(own)) - before) == 2, "both have begun")
    with own.search.halted():
        status, answer, _ = await tasks[0]
        assert status == 200, answer
        assert not tasks[1].done()
    state = await over(http, keys[1])
    await asyncio.gather(*tasks)
    await session.close()

    assert len(answer["retrieval"]["retrievals"]) <= RETRIEVALS
    assert len(state["result"]["retrieval"]["retrievals"]) == RETRIEVALS + 1


async def failing(mesh: Mesh, stopping: asyncio.Event) -> int:
    """Serve searches in place of the mesh's own process, each with an error; return how many jobs were convicted."""
    config = Common(data_dir=str(mesh.directory), redis_url=mesh.redis.url)
    bus, convicted = await Bus.open(config, SystemClock()), 0
    record = WorkerRecord(incarnation_name("search"), ["cpu"], "cpu", 100, 1 << 30, beta_s=0.01)
    worker = Worker(bus, Family("search"), record)
    await worker.start()
    try:
        while not stopping.is_set():
            for lease in await worker.reader.read(10, 100):
                verdict = await worker.outbox.fail(lease, "internal_error", "it broke")
                convicted += verdict == "dead"
        await worker.drain()
        await worker.stop()
    finally:
        await bus.close()
    return convicted


async def test_a_convicted_search_leaves_the_passages(
    own: Writing, http: aiohttp.ClientSession, pages: str
) -> None:
    """An answer that waits for a retrieval whose search becomes a dead letter goes on at once, on what it has."""
    body, before, stopping = asked(pages, 11), set(replaced(own)), asyncio.Event()
    keys, tasks, session = await asking(own.url, [body])
    await until(
        lambda: any(replaced(own)[job] for job in set(replaced(own)) - before), "a retrieval"
    )
    await asyncio.to_thread(own.search.kill)
    serving = asyncio.create_task(failing(own, stopping))
    try:
        state = await over(http, keys[0])
    finally:
        stopping.set()
        convicted = await serving
        own.search.start()
    await asyncio.gather(*tasks)
    await session.close()
    records = state["result"]["retrieval"]["retrievals"]

    assert state["state"] == "result"
    assert len(records) == RETRIEVALS + 1
    kept = [record for record in records if record.get("kept") == "job_failed"]
    assert len(kept) == convicted > 0
    assert all(record["replaced"] == [] for record in kept)
