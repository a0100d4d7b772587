"""Grounded answers with nothing scripted: router, encoder, search and the shipped model, over pages of its handbook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from models.demo.world import handbook
from services.router.text.quotes import LABEL, REFUSAL
from tests.support.chat import frames_of, post, text_of
from tests.support.mesh import Mesh
from tests.support.scripted_generator import known

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
PAGES = 24
MODEL = "spillway-demo"


class Real(Mesh):
    """A mesh with a real encoder and the shipped model, in float32, on one thread."""

    def _start(self) -> None:
        flags = ("--device", "cpu", "--threads", "1", "--chat-model", str(DEMO))
        self.worker = self.add("gpu_worker", "0", *flags, "--chat-dtype", "fp32", "--dtype", "fp32")
        self.search = self.add("vector_search", "0")
        self.router = self.add_router("0")
        self.url = self.address(self.router)
        self.wait_ready(self.url)


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    made = Real()
    yield made
    made.close()


@pytest.fixture
async def http(real: Real) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(real.url, timeout=timeout) as session:
        await known(session, MODEL)
        await _load(session)
        yield session


async def _load(http: aiohttp.ClientSession) -> None:
    """Store some pages; a second time they are unchanged."""
    await post(http, {"name": "pages"}, "/v1/collections")
    some = [{"id": page.name, "text": page.text} for page in handbook.pages()[:PAGES]]
    status, answer, _ = await post(http, {"documents": some}, "/v1/collections/pages/documents")
    assert status == 200, answer


def asks(text: str, **more: Any) -> dict[str, Any]:
    retrieval = {"collection": "pages", "include_passages": True, **more.pop("retrieval", {})}
    message = {"role": "user", "content": text}
    return {
        "messages": [message],
        "retrieval": retrieval,
        "temperature": 0,
        "max_tokens": 40,
    } | more


def check(answer: dict[str, Any], page: str) -> None:
    """The page that says it was found; every citation points at its marker and at a passage of the prompt."""
    message, passages = answer["choices"][0]["message"], answer["retrieval"]["passages"]
    texts = {each.name: each.text for each in handbook.pages()}
    assert page in {row["document_id"] for row in passages}
    for row in passages:
        assert texts[row["document_id"]][row["start"] : row["end"]] == row["text"]
    for citation in message["citations"]:
        row = passages[citation["index"] - 1]
        assert message["content"][slice(*citation["at"])] == f"[{citation['index']}]"
        assert [citation[key] for key in ("document_id", "start", "end")] == [
            row[key] for key in ("document_id", "start", "end")
        ]


async def test_questions_are_answered_from_their_pages(http: aiohttp.ClientSession) -> None:
    """The right page is in the prompt, and citations are true; asked together, each gets the answer it gets alone."""
    questions = list(islice(handbook.questions(PAGES), 6))
    together = await asyncio.gather(*(post(http, asks(q.text)) for q in questions))
    for question, (status, answer, _) in zip(questions, together, strict=True):
        assert status == 200, answer
        check(answer, question.page)
    _, alone, _ = await post(http, asks(questions[0].text))

    assert alone["choices"] == together[0][1]["choices"]


async def test_nothing_found_is_said_without_the_model(http: aiohttp.ClientSession) -> None:
    """The fixed sentence, no passage, and nothing but that sentence in the usage."""
    status, answer, _ = await post(http, asks("Who?", retrieval={"min_score": 0.99}, max_tokens=2))
    choice = answer["choices"][0]

    assert status == 200
    assert choice["message"]["content"] == (
        "No passage was found in collection 'pages' for this question."
    )
    assert choice["finish_reason"] == "stop"
    assert answer["retrieval"]["found"] == 0


async def test_a_conversation_finds_what_it_leans_on(http: aiohttp.ClientSession) -> None:
    """A later turn that names nothing is answered from the page of the turn before.

    The session keeps what its answers rest on and where they cite it, as their responses said.
    """
    town = next(page for page in handbook.pages() if page.who.kind == "town")
    _, made, _ = await post(http, {}, "/v1/sessions")
    given = []
    for number, text in enumerate((f"Who is the mayor of {town.who.name}?", "And its river?"), 1):
        status, answer, _ = await post(http, asks(text, session=made["id"]))
        assert (status, answer["session"]["version"]) == (200, number), answer
        check(answer, town.name)
        del answer["retrieval"][
            "stages"
        ]  # of the response: a session keeps what its answers rest on
        given.append((answer["retrieval"], answer["choices"][0]["message"]["citations"]))
    async with http.get(f"/v1/sessions/{made['id']}?include=messages") as response:
        shown = await response.json()

    said = [m["content"] for m in shown["messages"] if m["role"] == "user"]
    assert said == [f"Who is the mayor of {town.who.name}?", "And its river?"]
    kept = [(m["retrieval"], m["citations"]) for m in shown["messages"] if m["role"] == "assistant"]
    assert kept == given


async def test_a_long_answer_reads_what_it_comes_to_speak_of(http: aiohttp.ClientSession) -> None:
    """Passages are found anew beside the generation; each time it is asked, the answer and what it rests on are one.

    Every passage is a part of its page, whatever it lost at its beginning, and every citation one of the passages.
    """
    question = next(iter(handbook.questions(PAGES)))
    wishes = {"interval": 16, "k": 3, "effort": "exact"}
    body = asks(question.text, retrieval=wishes, max_tokens=72, ignore_eos=True)
    answers = [(await post(http, body))[1] for _ in range(2)]
    texts = {each.name: each.text for each in handbook.pages()}
    retrieval, message = answers[0]["retrieval"], answers[0]["choices"][0]["message"]
    rows = {row["index"]: row for row in retrieval["passages"]}
    records = retrieval["retrievals"]

    assert [record["at_token"] for record in records] == [0, 16, 32, 48, 64]
    assert question.page in {rows[index]["document_id"] for index in records[0]["passages"]}
    assert any(record["replaced"] for record in records)
    assert (
        len({rows[index]["document_id"] for record in records for index in record["passages"]}) > 3
    )
    for row in rows.values():
        assert texts[row["document_id"]][row["start"] : row["end"]] == row["text"]
    for citation in message["citations"]:
        row = rows[citation["index"]]
        assert [citation[key] for key in ("document_id", "start", "end")] == [
            row[key] for key in ("document_id", "start", "end")
        ]

    def told(answer: dict[str, Any]) -> Any:
        held = [
            (record["at_token"], record["passages"], record["replaced"], record.get("kept"))
            for record in answer["retrieval"]["retrievals"]
        ]
        return answer["choices"], answer["retrieval"]["passages"], held

    assert told(answers[1]) == told(answers[0])


NOTES = {
    "dam.pdf": "The dam stands above the town. Its spillway was rebuilt in 1987 by engineers from Brno.",
    "leave.md": "# Leave\n\nEvery employee has 30 days of paid leave a year. Ask for it two weeks ahead.",
    "pumps.md": "# Pumps\n\n- Pump A runs on diesel.\n- Pump B runs on electricity and needs 400 V.",
}


async def test_what_the_model_cannot_read_is_quoted(http: aiohttp.ClientSession) -> None:
    """Real documents are answered by their own sentences, labelled, with exact citations and pages; or refused.

    The same whole and as a stream; the session keeps it, and so does an export.
    """
    await post(http, {"name": "notes"}, "/v1/collections")
    pages = {"pages": [0, 31], "first_page": 7}
    some = [
        {"id": key, "text": text, "metadata": pages if key == "dam.pdf" else {}}
        for key, text in NOTES.items()
    ]
    assert (await post(http, {"documents": some}, "/v1/collections/notes/documents"))[0] == 200
    _, made, _ = await post(http, {}, "/v1/sessions")

    async def ask(text: str, **more: Any) -> Any:
        body = asks(text, retrieval={"collection": "notes"}, max_tokens=2, **more)
        status, answer, _ = await post(http, body)
        assert status == 200, answer
        stages = [stage["name"] for stage in answer["retrieval"].pop("stages")]
        assert stages == ["embed", "search", "quotes", "prompt"]
        return answer

    answer = await ask("When was the spillway rebuilt?", session=made["id"])
    message, retrieval = answer["choices"][0]["message"], answer["retrieval"]
    first = message["citations"][0]
    said = NOTES["dam.pdf"][first["start"] : first["end"]]
    assert said == "Its spillway was rebuilt in 1987 by engineers from Brno."
    assert message["content"].startswith(f"{LABEL}\n\n{said} [1]")
    assert (first["document_id"], first["page"], first["last_page"]) == ("dam.pdf", 8, 8)
    assert (retrieval["extractive"], retrieval["found"]) == (True, len(NOTES))
    assert retrieval["passages"][0]["text"] == said
    alone = await ask("When was the spillway rebuilt?")
    assert alone["choices"] == answer["choices"]
    async with http.get(f"/v1/sessions/{made['id']}?include=messages") as response:
        kept = (await response.json())["messages"][-1]
    assert (kept["retrieval"], kept["citations"]) == (retrieval, message["citations"])
    refused = await ask("Who painted the Mona Lisa?")
    assert refused["choices"][0]["message"]["content"] == REFUSAL
    assert refused["choices"][0]["message"]["citations"] == []
    assert len(refused["retrieval"]["passages"]) == len(NOTES)


@pytest.mark.soak  # a real worker takes long to come back
async def test_a_killed_worker_changes_no_token(http: aiohttp.ClientSession, real: Real) -> None:
    """The worker that embeds and generates dies in mid-answer: its successor goes on with the same tokens."""
    body = asks(
        "Tell me everything.", max_tokens=400, ignore_eos=True, seed=7, stream=True, temperature=0.8
    )
    whole = await _read(http, body, None)
    killed = await _read(http, body, real)

    assert text_of(killed) == text_of(whole)
    assert [name for name, _ in killed if name] == sorted(
        {name for name, _ in killed if name}, key=lambda name: int(name.split(".")[0])
    )
    assert killed[-1][1] == "[DONE]"


async def _read(
    http: aiohttp.ClientSession, body: dict[str, Any], kill: Real | None
) -> list[tuple[str, Any]]:
    raw = b""
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        async for chunk in response.content.iter_any():
            raw += chunk
            if kill is not None and raw.count(b"id: ") > 5:
                worker, kill = kill.worker, None
                await asyncio.to_thread(worker.kill)
                worker.start()
    return frames_of(raw)
