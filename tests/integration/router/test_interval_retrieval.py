"""Passages found anew while an answer is written: a real router, search and engine; what is said is the sim's.

The sim device repeats a number made of its prompt, so its answer tells at every token which passages the prompt held.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from common.bus import Bus
from engine.decoder.executor.simulated_executor import ASSISTANT, END, USER, answer
from services.kv_store.sessions.session_documents import RetrievalDocument
from services.router.text.intervals import WINDOW
from services.router.text.passages import Passage, render
from tests.support.chat import asks, frames_of, post, stream, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import Generator, Scene
from tests.support.waiting import until

QUESTION = "Which of the documents says what, and why?"
DOCUMENTS = {
    f"d{n}.md": f"Document {n} begins so. " + f"It says {n * n} in its middle. " * n + f"Then {n}."
    for n in range(8)
}
K, INTERVAL, MOST = 2, 16, 72


@pytest.fixture
async def pages(http: aiohttp.ClientSession, name: str) -> str:
    """A collection of documents of one chunk each."""
    documents = [{"id": key, "text": text} for key, text in DOCUMENTS.items()]
    path = f"/v1/collections/{name}/documents"
    status, told, _ = await post(http, {"documents": documents}, path)
    assert status == 200, told
    return name


def grounded(pages: str, **more: Any) -> dict[str, Any]:
    retrieval = {
        "collection": pages,
        "k": K,
        "interval": INTERVAL,
        "include_passages": True,
        **more.pop("retrieval", {}),
    }
    asked = {"messages": [{"role": "user", "content": QUESTION}], "model": "sim-chat"}
    return asked | {"retrieval": retrieval, "max_tokens": MOST, "temperature": 0} | more


def said(passages: dict[int, Passage], records: Sequence[dict[str, Any]], place: Any) -> str:
    """Return what the sim says if the prompt holds the passages of each record from its token on."""
    output = bytearray()
    while len(output) < MOST:
        held = [record["passages"] for record in records if record["at_token"] <= len(output)][-1]
        text = render("", [passages[index] for index in held], QUESTION, place)
        phrase = answer([USER, *text.encode(), END, ASSISTANT], 0)
        output.append(phrase[len(output) % len(phrase)])
    return output.decode()


async def found(http: aiohttp.ClientSession, pages: str, said: str, at: int) -> list[str]:
    """Return the documents that a search for the last tokens as of the token `at` finds."""
    query = (QUESTION + said[:at])[-WINDOW:]
    path = f"/v1/collections/{pages}/search"
    status, told, _ = await post(http, {"text": query, "k": K, "effort": "exact"}, path)
    assert status == 200, told
    return [hit["id"] for hit in told["data"]]


@pytest.mark.usefixtures("chatting")
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("stale", [True, False])
async def test_each_interval_is_written_from_its_own_passages(
    http: aiohttp.ClientSession, pages: str, place: str, stale: bool
) -> None:
    """Each retrieval finds what a search for its query finds, and its passages are in the prompt from its token on.

    A stale query is an interval old, and its passages have lost as many tokens; one that is not stale, none.
    """
    status, told, _ = await post(http, grounded(pages, retrieval={"stale": stale, "place": place}))
    assert status == 200, told
    text, retrieval = told["choices"][0]["message"]["content"], told["retrieval"]
    passages = {
        passage.index: passage for passage in msgspec.convert(retrieval["passages"], list[Passage])
    }
    records = retrieval["retrievals"]

    assert [record["at_token"] for record in records] == [0, 16, 32, 48, 64]
    assert text == said(passages, records, place)
    assert records[0]["passages"] == [1, 2]
    for before, record in itertools.pairwise(records):
        held = [passages[index] for index in record["passages"]]
        shift = INTERVAL if stale else 0
        assert record["query_at"] == record["at_token"] - shift
        assert [each.document_id for each in held] == await found(
            http, pages, text, record["query_at"]
        )
        for each in held:
            whole = DOCUMENTS[each.document_id]
            assert each.text == whole[each.start : each.end]
            assert each.text == whole[shift:].lstrip()
        assert set(record["replaced"]) == set(before["passages"]) - set(record["passages"])
        assert record["query_tokens"] == min(WINDOW, len(QUESTION) + record["query_at"])
        assert ("budget_ms" in record) == stale
        stages = {stage["name"]: stage for stage in record["stages"]}
        assert stages.keys() == {"embed", "search", "prompt"}
        assert stages["embed"]["end_ms"] <= stages["search"]["end_ms"]


@pytest.mark.usefixtures("chatting")
async def test_a_stream_tells_of_retrievals_where_they_count(
    http: aiohttp.ClientSession, pages: str
) -> None:
    """Between the tokens before and after; put together they are the whole answer's; a reader may come back."""
    frames, headers = await stream(http, grounded(pages))
    _, whole, _ = await post(http, grounded(pages))
    chunks = [data for _, data in frames[:-1]]
    told = [chunk["retrieval"] for chunk in chunks if "retrieval" in chunk]
    written_by = 0
    for chunk in chunks:
        if "retrieval" in chunk:
            assert chunk["retrieval"]["retrievals"][-1]["at_token"] == written_by
        written_by += len(chunk["choices"][0]["delta"].get("content") or "")
    middle = [name for name, _ in frames if name][len(frames) // 3]
    path = f"/v1/requests/{headers['x-request-id']}/events"
    async with http.get(path, headers={"Last-Event-ID": middle}) as response:
        rest = frames_of(await response.read())

    def plain(records: Sequence[dict[str, Any]]) -> list[Any]:
        return [(r["at_token"], r["passages"], r["replaced"]) for r in records]

    every = [record for one in told for record in one["retrievals"]]
    assert plain(every) == plain(whole["retrieval"]["retrievals"])
    assert text_of(frames) == whole["choices"][0]["message"]["content"]
    rows = {row["index"]: row for one in told for row in one["passages"]}
    assert list(rows.values()) == whole["retrieval"]["passages"]
    assert rest == frames[[name for name, _ in frames].index(middle) + 1 :]


@pytest.mark.usefixtures("chatting")
async def test_what_makes_no_sense_is_refused(http: aiohttp.ClientSession, pages: str) -> None:
    """Statuses tell what is wrong; an answer shorter than an interval, and `auto`, are answers."""
    cases: list[tuple[dict[str, Any], str]] = [
        (grounded(pages, retrieval={"interval": 7}), "retrieval.interval"),
        (grounded(pages, retrieval={"interval": 65}), "retrieval.interval"),
        (grounded(pages, retrieval={"interval": None, "stale": True}), "retrieval.stale"),
        (grounded(pages, retrieval={"interval": None, "late": "keep"}), "retrieval.late"),
        (grounded(pages, retrieval={"stale": False, "late": "keep"}), "retrieval.late"),
        (grounded(pages, retrieval={"stale": False, "shift": 8}), "retrieval.shift"),
        (grounded(pages, retrieval={"place": "beside"}), "retrieval.place"),
        (grounded(pages, n=2), "n"),
    ]
    for body, param in cases:
        status, told, _ = await post(http, body)
        assert (status, told["error"]["param"]) == (400, param), told
    for more in ({"max_tokens": INTERVAL}, {"retrieval": {"interval": "auto"}}):
        status, told, _ = await post(http, grounded(pages, **more))
        assert status == 200, told
        assert told["retrieval"]["retrievals"][0]["at_token"] == 0


# -- a generator that says what the test wants ------------------------------------------------------------


def scripted(pages: str, text: str = QUESTION, **more: Any) -> dict[str, Any]:
    retrieval = {"collection": pages, "k": K, "interval": 8, **more.pop("retrieval", {})}
    return asks(text, retrieval=retrieval, **{"max_tokens": 25, **more})


def writes(*parts: str) -> Any:
    """Return a script that says parts of 8 tokens, and takes an extension between two of them."""

    async def script(scene: Scene) -> None:
        for number, part in enumerate(parts):
            if number:
                await scene.extended(number, at=8 * number)
            await scene.text(part, finish="stop" if number == len(parts) - 1 else None)
        await scene.end()

    return script


async def test_citations_are_of_the_passages_that_the_prompt_held(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """A passage keeps its number as long as it is found; the session keeps what its response told, and goes on."""
    model.script = writes("It [1,2]", " so [3].", " as [5].", ".")
    _, session, _ = await post(http, {"model": "scripted"}, "/v1/sessions")
    status, told, _ = await post(http, scripted(pages, session=session["id"]))
    assert status == 200, told
    rows = {row["index"]: row for row in told["retrieval"]["passages"]}
    cited = [(c["index"], c["document_id"]) for c in told["choices"][0]["message"]["citations"]]
    async with http.get(f"/v1/sessions/{session['id']}?include=messages") as response:
        kept = (await response.json())["messages"][-1]

    assert {1, 2, 3, 4} <= rows.keys()
    assert cited == [(n, rows[n]["document_id"]) for n in (1, 2, 3, 5) if n in rows]
    assert (kept["retrieval"]["retrievals"], kept["citations"]) == (
        told["retrieval"]["retrievals"],
        told["choices"][0]["message"]["citations"],
    )
    exported = msgspec.convert(kept["retrieval"], RetrievalDocument)
    assert msgspec.to_builtins(exported.retrievals) == kept["retrieval"]["retrievals"]


async def test_a_retrieval_that_finds_nothing_keeps_the_passages(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """Documents that are deleted meanwhile are found no more; a collection that is gone leaves the passages, too."""
    found, gone = asyncio.Event(), asyncio.Event()

    async def script(scene: Scene) -> None:
        await scene.text("w" * 8)
        first = await scene.extended(1, at=8)
        assert first.changes
        found.set()
        await gone.wait()
        await scene.text("x" * 8)  # the third query knows these
        await scene.extended(2, at=16)
        await scene.text("y" * 8)
        third = await scene.extended(3, at=24)
        assert not third.changes
        await scene.text("z", finish="stop")
        await scene.end()

    model.script = script
    asked = asyncio.create_task(post(http, scripted(pages)))
    await until(found.is_set, "the first retrieval took effect")
    path = f"/v1/collections/{pages}/documents/delete"
    assert (await post(http, {"ids": list(DOCUMENTS)}, path))[0] == 200
    gone.set()
    status, told, _ = await asked
    records = told["retrieval"]["retrievals"]

    assert status == 200, told
    assert (records[-1]["kept"], records[-1]["found"]) == ("nothing_found", 0)
    assert records[-1]["passages"] == records[-2]["passages"]
    assert records[-1]["replaced"] == []


async def test_late_retrievals_are_waited_for_or_passed(
    http: aiohttp.ClientSession, model: Generator, pages: str, bus: Bus
) -> None:
    """With `keep` a generation that is ahead gets what its latest tokens find; both say what was late."""

    async def ahead(scene: Scene) -> None:
        await scene.text("a" * 24)  # past the second boundary before the first retrieval
        state = await bus.control.state(scene.lease.job)
        while not state.extensions:
            await asyncio.sleep(0.01)
            state = await bus.control.state(scene.lease.job)
        await scene.extended(state.extensions[-1].number, at=24)
        await scene.text("b", finish="stop")
        await scene.end()

    model.script = ahead
    status, told, _ = await post(http, scripted(pages, retrieval={"late": "keep"}))
    assert status == 200, told
    [_, record] = told["retrieval"]["retrievals"]
    assert record["at_token"] == 24
    assert record["late"] == (record["query_at"] < 16)


async def test_a_cancelled_answer_ends_its_retrievals(
    http: aiohttp.ClientSession, model: Generator, mesh: Mesh, pages: str
) -> None:
    """Whoever leaves in mid-answer leaves no job behind."""

    async def talks(scene: Scene) -> None:
        number = 0
        while not scene.stopped:
            number += 1
            await scene.text("on and o")
            if number < 3:
                await scene.extended(number, at=8 * number)
            await asyncio.sleep(0.02)

    model.script = talks
    asked = asyncio.create_task(post(http, scripted(pages, max_tokens=900)))
    await until(lambda: model.works, "the answer begins")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)

    def running() -> set[str]:
        with mesh.redis.client() as client:
            states = {
                key.decode(): (client.hget(key, "state") or b"").decode()
                for key in client.scan_iter("*:job:*")
            }
        return {key for key, state in states.items() if state in {"queued", "running"}}

    await until(lambda: not running(), "no job is left")
