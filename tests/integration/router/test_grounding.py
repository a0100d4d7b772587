"""Grounded chats over a scripted generator: passages, citations, sessions, refusals, and what nothing found means."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest

from common.wire.jobs import GenerateWork
from tests.support.chat import asks, post, stream, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import NAME, Generator, Scene, byte_tokenizer
from tests.support.waiting import until

DOCUMENTS = {
    "velmora.md": "The capital of Velmora is Oskari.",
    "tun.md": "The river of Tun is the Ims.",
    "bo.md": "Bo was born in Tun.",
}


@pytest.fixture
async def pages(http: aiohttp.ClientSession, name: str) -> str:
    """A collection of three pages; the sim encoder finds a page by its own words."""
    documents = [
        {
            "id": key,
            "text": text,
            "metadata": {"pages": [0, 20], "first_page": 3} if "v" in key else {},
        }
        for key, text in DOCUMENTS.items()
    ]
    status, answer, _ = await post(
        http, {"documents": documents}, f"/v1/collections/{name}/documents"
    )
    assert status == 200, answer
    return name


def grounded(pages: str, text: str = DOCUMENTS["velmora.md"], **more: Any) -> dict[str, Any]:
    retrieval = {"collection": pages, "k": 2, **more.pop("retrieval", {})}
    return asks(text, retrieval=retrieval, **more)


async def cite(scene: Scene) -> None:
    """Answer with markers that are split across pieces, one of a passage that is not there."""
    for text in ("It is Oskari [", "1", "]; see [1, 2", "] and [7]."):
        await scene.text(text, finish="stop" if text.endswith("].") else None)
    await scene.end()


async def forced(scene: Scene) -> None:
    """Say what is forced, or that something was computed."""
    tokens = scene.work.forced
    await scene.text(byte_tokenizer().decode(tokens) if tokens else "computed", finish="stop")
    await scene.end()


def prompt_of(work: GenerateWork) -> str:
    text: str = byte_tokenizer().decode(work.prompts[0], skip_special_tokens=False)
    return text


async def test_an_answer_rests_on_passages_and_cites_them(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """The best passages are in the prompt; citations name documents, offsets and where the marker stands."""
    model.script = cite
    status, answer, headers = await post(http, grounded(pages))
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    said, rows = message["content"], answer["retrieval"]["passages"]

    assert said == "It is Oskari [1]; see [1, 2] and [7]."
    assert (answer["retrieval"]["collection"], answer["retrieval"]["found"]) == (pages, 2)
    assert [row["index"] for row in rows] == [1, 2]
    assert (rows[0]["document_id"], rows[0]["start"], rows[0]["end"]) == ("velmora.md", 0, 33)
    assert "text" not in rows[0]
    assert [(row.get("page"), row.get("page_starts")) for row in rows] == [(3, [20]), (None, None)]
    cited = [(c["index"], c["document_id"], said[slice(*c["at"])]) for c in message["citations"]]
    second = rows[1]["document_id"]
    assert cited == [
        (1, "velmora.md", "[1]"),
        (1, "velmora.md", "[1, 2]"),
        (2, second, "[1, 2]"),
    ]
    pages_of = [(c.get("page"), c.get("last_page")) for c in message["citations"]]
    assert pages_of == [(3, 4), (3, 4), (None, None)]
    prompt = prompt_of(model.works[-1])
    assert f"[1] {DOCUMENTS['velmora.md']}\n\n[2] {DOCUMENTS[second]}" in prompt
    assert prompt.count(DOCUMENTS["velmora.md"]) == 2  # the passage and the question
    name = headers["x-request-id"]
    async with http.get(f"/v1/requests/{name}") as response:
        state = await response.json()
    assert (state["state"], state["result"]) == ("result", answer)


async def test_a_stream_carries_passages_first_and_citations_last(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """The first chunk has `retrieval`, the last of the content `citations`; a reader that comes back gets the same."""
    model.script = cite
    body = grounded(pages, retrieval={"include_passages": True})
    frames, headers = await stream(http, body)
    chunks = [data for _, data in frames[:-1]]
    name = headers["x-request-id"]

    assert text_of(frames) == "It is Oskari [1]; see [1, 2] and [7]."
    assert chunks[0]["retrieval"]["passages"][0]["text"] == DOCUMENTS["velmora.md"]
    assert all("retrieval" not in chunk for chunk in chunks[1:])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [c["document_id"] for c in deltas[-1]["citations"]][:2] == ["velmora.md"] * 2
    assert all("citations" not in delta for delta in deltas[:-1])
    async with http.get(f"/v1/requests/{name}/events", headers={"Last-Event-ID": "1.0"}) as late:
        rest = (await late.read()).decode()
    assert "id: 2.0" in rest
    assert "id: 1.0" not in rest
    assert json.dumps(deltas[-1]["citations"], separators=(",", ":")) in rest


@pytest.mark.parametrize("retrieval", [{"min_score": 2.0}, {"filter": {"no": "where"}}])
async def test_no_passage_is_said_plainly(
    http: aiohttp.ClientSession, model: Generator, pages: str, retrieval: dict[str, Any]
) -> None:
    """Where nothing is found the answer is a fixed sentence, whole whatever the limits, and nothing is computed."""
    model.script = forced
    status, answer, _ = await post(
        http, grounded(pages, retrieval=retrieval, max_tokens=3, stop=["passage"])
    )
    assert status == 200, answer
    choice = answer["choices"][0]

    assert status == 200
    assert choice["message"]["content"] == (
        f"No passage was found in collection '{pages}' for this question."
    )
    assert choice["message"]["citations"] == []
    assert [stage["name"] for stage in answer["retrieval"].pop("stages")] == [
        "embed",
        "search",
        "prompt",
    ]
    assert answer["retrieval"] == {"collection": pages, "found": 0, "passages": []}


async def test_passages_fit_the_context(
    http: aiohttp.ClientSession, model: Generator, name: str
) -> None:
    """Whole passages as they fit, the first one cut after a sentence; where no sentence fits that is an error."""
    long = " ".join(f"Sentence {n} of a long page." for n in range(120))
    documents = [{"id": f"p{n}", "text": long[n:]} for n in range(3)]
    body = {"name": f"{name}l", "chunking": {"max_tokens": 60, "overlap_tokens": 0}}
    assert (await post(http, body, "/v1/collections"))[0] == 201
    path = f"/v1/collections/{name}l/documents"
    assert (await post(http, {"documents": documents}, path))[0] == 200
    question = "Sentence 1 of a long page."
    model.script = forced

    async def ask(max_tokens: int, k: int, before: str = "") -> tuple[int, Any]:
        asked = grounded(f"{name}l", question, retrieval={"k": k}, max_tokens=max_tokens)
        if before:
            asked["messages"] = [
                {"role": "user", "content": before},
                {"role": "assistant", "content": "Yes."},
                *asked["messages"],
            ]
        status, answer, _ = await post(http, asked)
        return status, answer

    _, many = await ask(100, 50)
    work = model.works[-1]
    assert 0 < len(many["retrieval"]["passages"]) < many["retrieval"]["found"]
    assert len(work.prompts[0]) + 100 <= 2000

    _, few = await ask(1300, 5)
    rows = few["retrieval"]["passages"]
    assert len(rows) == 1
    assert prompt_of(model.works[-1]).count("[1] ") == 2  # of the instruction, and of the passage
    assert len(model.works[-1].prompts[0]) + 1300 <= 2000

    _, cut = await ask(100, 5, before="x" * 1450)
    [row] = cut["retrieval"]["passages"]
    assert 0 < row["end"] - row["start"] < rows[0]["end"] - rows[0]["start"]
    page = documents[int(row["document_id"][1:])]["text"]
    assert page[row["start"] : row["end"]].endswith("page.")
    assert page[row["start"] : row["end"]] in prompt_of(model.works[-1])

    status, full = await ask(100, 5, before="x" * 1650)
    assert (status, full["error"]["code"]) == (400, "context_length_exceeded")
    async with http.delete(f"/v1/collections/{name}l") as response:
        assert response.status == 200


async def test_what_cannot_be_grounded_is_refused(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """Statuses tell what is wrong before a stream begins."""
    vectors = {"name": f"{pages}v", "model": None, "dimension": 4}
    assert (await post(http, vectors, "/v1/collections"))[0] == 201
    cases: list[tuple[dict[str, Any], int, str]] = [
        (grounded("nowhere"), 404, "collection_not_found"),
        (grounded(f"{pages}v"), 400, "vectors_only"),
        (grounded(pages, retrieval={"k": 0}), 400, "invalid_value"),
        (grounded(pages, retrieval={"kay": 3}), 400, "unknown_field"),
        (grounded(pages, retrieval={"filter": {"$odd": 1}}), 400, "invalid_filter"),
        (grounded(pages, "  "), 400, "empty_input"),
        (grounded(pages, n=2), 400, "unsupported"),
        (grounded(pages, "x" * 1990), 400, "context_length_exceeded"),
        (grounded(pages, max_tokens=1995), 400, "context_length_exceeded"),
    ]
    for body, status, code in cases:
        for streamed in (False, True):
            found, error, _ = await post(http, {**body, "stream": streamed})
            assert (found, error["error"]["code"]) == (status, code), error
    _, error, _ = await post(http, grounded("docs"))
    hint = "no collection 'docs'; `spillway samples` loads the sample collections"
    assert error["error"]["message"] == hint
    async with http.get("/v1/collections/docs") as response:
        assert (await response.json())["error"]["message"] == hint
    async with http.delete(f"/v1/collections/{pages}v") as response:
        assert response.status == 200


async def new_session(http: aiohttp.ClientSession) -> str:
    status, made, _ = await post(http, {"model": NAME}, "/v1/sessions")
    assert status in {200, 201}, made
    return str(made["id"])


async def test_a_session_keeps_what_was_rendered_and_what_was_sent(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """A turn's passages stay in the history; a follow-up is searched with the question it leans on."""
    session = await new_session(http)
    model.script = cite
    first, second = DOCUMENTS["tun.md"], "And its river?"
    status, answer, _ = await post(http, grounded(pages, first, session=session))
    assert status == 200, answer
    assert answer["session"]["version"] == 1
    status, answer, _ = await post(http, grounded(pages, second, session=session))
    assert status == 200, answer
    assert answer["session"]["version"] == 2
    one, two = model.works[-2:]

    assert one.turn is not None
    assert two.turn is not None
    assert msgspec.json.decode(two.turn.shown) == [{"role": "user", "content": second}]
    rendered = msgspec.json.decode(two.turn.messages)[0]["content"]
    assert rendered.endswith(f"Question: {second}")
    assert "[1] " in rendered
    assert two.turn.history == len(one.prompts[0]) + len("It is Oskari [1]; see [1, 2] and [7].")
    assert two.prompts[0][: len(one.prompts[0])] == one.prompts[0]


async def test_a_busy_session_is_a_status(
    http: aiohttp.ClientSession, model: Generator, pages: str
) -> None:
    """The turn lock is taken with the generate job: who comes meanwhile gets 409, or waits if it said so."""
    session, go = await new_session(http), asyncio.Event()

    async def wait(scene: Scene) -> None:
        await scene.text("so ")
        await go.wait()
        await scene.text("it is", finish="stop")
        await scene.end()

    model.script = wait
    body = grounded(pages, session=session)
    first = asyncio.create_task(post(http, body))
    async with asyncio.timeout(60):
        while not model.works:
            assert not first.done(), await first
            await asyncio.sleep(0.02)
    for streamed in (False, True):
        status, error, headers = await post(http, {**body, "stream": streamed})
        assert (status, error["error"]["code"]) == (409, "session_busy")
        assert ("Retry-After" in headers, headers["x-should-retry"]) == (False, "false")
    waiting = asyncio.create_task(post(http, {**body, "wait": True}))
    await asyncio.sleep(0.3)
    go.set()

    assert [(await asked)[0] for asked in (first, waiting)] == [200, 200]
    assert (await waiting)[1]["session"]["version"] == 2


async def test_full_lanes_are_a_status(
    http: aiohttp.ClientSession, mesh: Mesh, model: Generator, pages: str
) -> None:
    """Where the generator's lane is full, the client is told when to come back."""
    go = asyncio.Event()

    async def wait(scene: Scene) -> None:
        await go.wait()
        await cite(scene)

    model.script = wait
    consumer = model.consumer
    await consumer.incarnation.publish(msgspec.structs.replace(consumer.record, depth_items=1))
    first = asyncio.create_task(post(http, grounded(pages)))
    await until(lambda: model.works, "the first request generates")
    taken = [first]

    async def full() -> bool:
        # The router may not have read the new depth yet: it takes such a request, which waits as the first one does.
        works = len(model.works)
        asked = asyncio.create_task(post(http, grounded(pages)))
        await until(lambda: asked.done() or len(model.works) > works)
        if not asked.done():
            taken.append(asked)
        return asked.done()

    await until(full, "the lane is full")
    status, error, headers = await post(http, {**grounded(pages), "stream": True})
    go.set()

    assert (status, error["error"]["code"]) == (429, "depth")
    assert int(headers["Retry-After"]) >= 1
    assert [(await asked)[0] for asked in taken] == [200] * len(taken)
