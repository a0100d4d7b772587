"""Chats with precomputed passages: what the job and its extensions say, what the answer tells, and who is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from common.wire.control import Extend
from services.kv_store.sessions.session_documents import RetrievalDocument
from tests.support.chat import asks, post, stored, stream, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import Generator, Scene, byte_tokenizer, generator, known

PLACING = "placing"  # a scripted model whose workers can place passages
QUESTION = "Which of the documents says what, and why?"
DOCUMENTS = {
    f"d{n}.md": f"Document {n} begins so. " + f"It says {n * n} in its middle. " * n + f"Then {n}."
    for n in range(6)
}


@pytest.fixture
async def placing(mesh: Mesh, http: aiohttp.ClientSession) -> AsyncIterator[Generator]:
    """A scripted generator that can place passages, known to the router."""
    changes = {"name": PLACING, "precomputes": True}
    async with generator(mesh.redis.url, mesh.directory, **changes) as made:
        await known(http, PLACING)
        yield made


@pytest.fixture
async def pages(http: aiohttp.ClientSession) -> str:
    """A collection of documents of one chunk each."""
    return await stored(http, DOCUMENTS)


def grounded(pages: str, **more: Any) -> dict[str, Any]:
    given = {"collection": pages, "k": 2, "precomputed": True, "include_passages": True}
    retrieval = given | more.pop("retrieval", {})
    return asks(QUESTION, retrieval=retrieval, **({"model": PLACING} | more))


def texts(prompt: list[int], spans: list[tuple[int, int]]) -> list[str]:
    """Return the texts of a prompt's spans."""
    return [byte_tokenizer().decode(prompt[begin:end]) for begin, end in spans]


async def test_a_job_says_where_its_passages_lie(
    http: aiohttp.ClientSession, placing: Generator, pages: str
) -> None:
    """Its spans are the passages' texts, and answer and stream say that they are approximated; off, nothing does."""
    status, answer, _ = await post(http, grounded(pages))
    assert status == 200, answer
    work = placing.works[-1]
    assert answer["retrieval"]["approximate"] is True
    assert texts(work.prompts[0], work.spans) == [
        row["text"] for row in answer["retrieval"]["passages"]
    ]
    frames, _ = await stream(http, grounded(pages))
    first = frames[0][1]["retrieval"]
    assert first["approximate"] is True
    assert text_of(frames) == answer["choices"][0]["message"]["content"]

    prompt = work.prompts
    for off in ({"precomputed": False}, {"precomputed": None}):
        status, answer, _ = await post(http, grounded(pages, retrieval=off))
        assert status == 200, answer
        assert "approximate" not in answer["retrieval"]
        assert (placing.works[-1].spans, placing.works[-1].prompts) == ([], prompt)
    nothing = {"filter": {"no": "where"}}
    status, answer, _ = await post(http, grounded(pages, retrieval=nothing))
    assert status == 200, answer
    assert answer["retrieval"]["found"] == 0
    assert "approximate" not in answer["retrieval"]
    assert placing.works[-1].spans == []


async def test_extensions_say_where_the_new_passages_lie(
    http: aiohttp.ClientSession, placing: Generator, pages: str
) -> None:
    """The spans of an extension are the new passages' texts in the prompt that it makes; chunks say so."""
    taken: list[Extend] = []

    async def script(scene: Scene) -> None:
        await scene.text("Then 5. ")
        for number in (1, 2):
            taken.append(await scene.extended(number, at=8 * number))
            await scene.text("It says ", finish="stop" if number == 2 else None)
        await scene.end()

    placing.script = script
    body = grounded(pages, retrieval={"interval": 8, "stale": False}, max_tokens=24)
    frames, _ = await stream(http, body)
    told = [data["retrieval"] for _, data in frames[:-1] if "retrieval" in data]
    rows = {row["index"]: row["text"] for one in told for row in one["passages"]}
    records = [record for one in told for record in one["retrievals"]]
    work = placing.works[-1]

    assert all(one["approximate"] is True for one in told)
    assert len(records) == 3
    spans, prompt = work.spans, work.prompts[0]
    for record, extension in zip(records, [None, *taken], strict=True):
        if extension is not None and extension.changes:
            spans, prompt = extension.spans, extension.prompt(work.prompts[0])
        elif extension is not None:
            assert extension.spans == []
        assert texts(prompt, spans) == [rows[index] for index in record["passages"]]
    assert any(extension.changes for extension in taken)


async def test_a_session_remembers_it_and_reads_its_history_exactly(
    http: aiohttp.ClientSession, placing: Generator, pages: str
) -> None:
    """The turn tells that it was approximated; no span of a later turn lies in the history."""

    async def script(scene: Scene) -> None:
        await scene.text("It says 4.", finish="stop")
        await scene.end()

    placing.script = script
    status, made, _ = await post(http, {"model": PLACING}, "/v1/sessions")
    assert status in {200, 201}, made
    session = made["id"]
    for precomputed in (True, True, False):
        retrieval = {"precomputed": precomputed, "k": 1}
        status, answer, _ = await post(http, grounded(pages, session=session, retrieval=retrieval))
        assert status == 200, answer
    first, second, third = placing.works[-3:]
    assert first.turn is not None
    assert second.turn is not None
    assert 0 < second.turn.history < second.spans[0][0]
    assert len(second.spans) == 1
    assert third.spans == []
    async with http.get(f"/v1/sessions/{session}?include=messages") as response:
        kept = [m for m in (await response.json())["messages"] if m["role"] == "assistant"]
    assert [m["retrieval"].get("approximate") for m in kept] == [True, True, None]
    assert msgspec.convert(kept[0]["retrieval"], RetrievalDocument).approximate


async def test_who_is_refused(
    http: aiohttp.ClientSession, placing: Generator, model: Generator, pages: str
) -> None:
    """A model whose workers cannot, and values that are no truth value, before a stream begins and without a job."""
    before = len(placing.works) + len(model.works)
    cases: list[tuple[dict[str, Any], str]] = [
        (grounded(pages, model="scripted"), "unsupported"),
        *(
            (grounded(pages, retrieval={"precomputed": value}), "invalid_value")
            for value in ("true", 1, 0, 1.5, [], [True], {}, {"bytes": 1})
        ),
        (grounded(pages, retrieval={"approximate": True}), "unknown_field"),
    ]
    for body, code in cases:
        for streamed in (False, True):
            status, told, _ = await post(http, {**body, "stream": streamed})
            assert status == 400, told
            assert told["error"]["code"] == code, told
            if code != "unknown_field":
                assert told["error"]["param"] == "retrieval.precomputed"
    status, told, _ = await post(http, grounded(pages, model="scripted"))
    assert "RoPE" in told["error"]["message"]
    assert "leave it out" in told["error"]["message"]
    assert len(placing.works) + len(model.works) == before


@pytest.mark.usefixtures("chatting")
@pytest.mark.parametrize("interval", [None, 16])
async def test_a_worker_takes_such_jobs(
    http: aiohttp.ClientSession, pages: str, interval: int | None
) -> None:
    """The sim computes nothing of passages, so its answers are those of exact prompts, with an interval, too."""
    said = []
    for precomputed in (True, False):
        retrieval = {"precomputed": precomputed, "interval": interval, "effort": "exact"}
        body = grounded(pages, model="sim-chat", retrieval=retrieval, max_tokens=60, temperature=0)
        status, answer, _ = await post(http, body)
        assert status == 200, answer
        assert answer["retrieval"].get("approximate", False) is precomputed
        said.append(answer["choices"][0]["message"]["content"])
        if interval:
            assert any(record["replaced"] for record in answer["retrieval"]["retrievals"])
    assert said[0] == said[1]
