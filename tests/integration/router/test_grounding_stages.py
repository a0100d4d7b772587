"""Grounded chats that rewrite their question and rerank what is found: a scripted generator, a real cross-encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.router.test_grounding import (
    DOCUMENTS,
    forced,
    grounded,
    new_session,
    prompt_of,
)
from tests.support import encoder_models
from tests.support.chat import post, stored, stream
from tests.support.mesh import Mesh
from tests.support.scripted_generator import NAME, Generator, Scene, generator

RANKER = "small-ranker"
# Words that the small cross-encoder knows, so that every passage has a score of its own.
WORDS = {f"w{n}.md": " ".join(f"w{(n * k) % 119 + 1}" for k in range(1, 9)) for n in range(1, 13)}
ASKED = "Rewritten question:"


@pytest.fixture(scope="module")
def own() -> Iterator[Mesh]:
    """A mesh with a cross-encoder, which would change what other tests' rerank requests mean."""
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
        await asyncio.to_thread(own.wait_generator, own.url, NAME)
        yield made


@pytest.fixture(scope="module")
def ranker(own: Mesh) -> str:
    """A random cross-encoder of BERT's shape, served."""
    (place := own.directory / RANKER).mkdir()
    encoder_models.save(place, "bert", labels=1)
    flags = ("--embed-model", "none", "--rerank-model", str(place), "--dtype", "fp32")
    own.add("gpu_worker", "ranker", "--device", "cpu", "--threads", "1", *flags)
    own.wait_model(own.url, "rerank")
    return RANKER


def writes(text: str) -> Any:
    """Return a script that rewrites a question to `text`, and answers any other."""

    async def script(scene: Scene) -> None:
        if ASKED in scene.asked():
            await scene.text(text[:7])
            await scene.text(text[7:], finish="stop")
            await scene.end()
        else:
            await forced(scene)

    return script


def follow_up(name: str, **rewrite: Any) -> dict[str, Any]:
    body = grounded(name, "And its river?", retrieval={"k": 1, "rewrite": rewrite or True})
    before = [
        {"role": "user", "content": "Tell me of Tun."},
        {"role": "assistant", "content": "Tun is a town."},
    ]
    return {**body, "messages": [*before, *body["messages"]]}


def names(answer: dict[str, Any]) -> list[str]:
    return [stage["name"] for stage in answer["retrieval"]["stages"]]


async def test_a_model_rewrites_a_follow_up(http: aiohttp.ClientSession, model: Generator) -> None:
    """The search is for what the model wrote, told with its tokens; the same whole, as a stream and read again."""
    name = await stored(http, DOCUMENTS)
    model.script = writes(f'Question: "{DOCUMENTS["tun.md"]}"\nand more')
    status, answer, headers = await post(
        http, follow_up(name, max_tokens=40), **{"Spillway-Resume": "60"}
    )
    assert status == 200, answer
    told, asked = answer["retrieval"]["rewrite"], model.works[0]

    assert (told["by"], told["query"], told["model"]) == ("model", DOCUMENTS["tun.md"], NAME)
    assert (told["prompt_tokens"], asked.max_new) == (len(asked.prompts[0]), 40)
    assert [row["document_id"] for row in answer["retrieval"]["passages"]] == ["tun.md"]
    assert "User: Tell me of Tun.\nAssistant: Tun is a town." in prompt_of(asked)
    assert asked.sampling.temperature == 0
    assert asked.turn is None
    assert names(answer) == ["rewrite", "embed", "search", "prompt"]
    frames, _ = await stream(http, follow_up(name))
    assert frames[0][1]["retrieval"]["rewrite"]["query"] == told["query"]
    async with http.get(f"/v1/requests/{headers['x-request-id']}/timeline") as response:
        timeline = await response.json()
    stages = [job["stage"] for job in timeline["jobs"]]
    assert stages == ["request", "rewrite", "embed", "search", "generate"]
    assert [stage["name"] for stage in timeline["stages"]] == [*names(answer), "generate"]
    assert all(stage["start_ms"] <= stage["end_ms"] for stage in timeline["stages"])


async def test_what_a_rewriting_leaves_as_it_is(
    http: aiohttp.ClientSession, model: Generator
) -> None:
    """A first question has nothing to rewrite; where the model writes nothing the rule's query counts.

    A session's conversation is rewritten as one that is sent, and the session keeps what was asked.
    """
    name = await stored(http, DOCUMENTS)
    model.script = writes("   \n ")
    status, answer, _ = await post(http, grounded(name, retrieval={"rewrite": True}))
    assert (status, len(model.works)) == (200, 1)
    assert "rewrite" not in answer["retrieval"]

    session = await new_session(http)
    first = grounded(name, DOCUMENTS["bo.md"], session=session, retrieval={"k": 1})
    assert (await post(http, first))[0] == 200
    second = grounded(name, "And where?", session=session, retrieval={"k": 1, "rewrite": True})
    status, answer, _ = await post(http, second)
    assert status == 200, answer
    told = answer["retrieval"]["rewrite"]
    assert (told["by"], told["model"]) == ("rule", NAME)
    assert told["query"] == f"And where? {DOCUMENTS['bo.md']} computed"
    assert f"User: {DOCUMENTS['bo.md']}" in prompt_of(model.works[-2])
    async with http.get(f"/v1/sessions/{session}?include=messages") as response:
        said = [m["content"] for m in (await response.json())["messages"] if m["role"] == "user"]
    assert said == [DOCUMENTS["bo.md"], "And where?"]


async def test_a_rule_rewrites(own: Mesh, http: aiohttp.ClientSession, model: Generator) -> None:
    """Where the card says that the model reads one kind of text, or the client that it wants so: no job does."""
    name = await stored(http, DOCUMENTS)
    async with generator(
        own.redis.url, own.directory, name="reader", family="chat.reader", reads=0.5
    ) as made:
        await asyncio.to_thread(own.wait_generator, own.url, "reader")
        made.script = forced
        status, answer, _ = await post(http, {**follow_up(name), "model": "reader"})
        assert status == 200, answer

        assert len(made.works) == 1
        assert answer["retrieval"]["rewrite"]["by"] == "rule"
        assert names(answer)[:2] == ["embed", "search"]
        status, answer, _ = await post(http, {**follow_up(name, by="rule"), "model": NAME})
        assert (status, answer["retrieval"]["rewrite"]["by"]) == (200, "rule")
        assert len(model.works) == 1


async def test_a_cross_encoder_orders_what_was_found(
    http: aiohttp.ClientSession, model: Generator, ranker: str
) -> None:
    """The best k of the candidates, with the scores that /v1/rerank gives; the candidates are more than k."""
    name = await stored(http, WORDS)
    model.script = forced
    query = "w3 w17 w29"
    options = {"k": 3, "rerank": {"candidates": 8}, "include_passages": True}
    status, answer, _ = await post(http, grounded(name, query, retrieval=options))
    assert status == 200, answer
    found = await post(http, {"text": query, "k": 8}, f"/v1/collections/{name}/search")
    rows = found[1]["data"]
    asked = {"model": ranker, "query": query, "documents": [row["text"] for row in rows]}
    _, ranked, _ = await post(http, asked, "/v1/rerank")

    best = [(rows[one["index"]]["id"], one["relevance_score"]) for one in ranked["results"][:3]]
    passages = answer["retrieval"]["passages"]
    assert [row["document_id"] for row in passages] == [key for key, _ in best]
    assert [row["score"] for row in passages] == pytest.approx([score for _, score in best])
    assert [row["document_id"] for row in passages] != [row["id"] for row in rows[:3]]
    told = answer["retrieval"]["rerank"]
    assert (told["model"], told["candidates"]) == (ranker, 8)
    assert told["tokens"] > 0
    assert names(answer) == ["embed", "search", "rerank", "prompt"]
    few = await post(http, grounded(name, query, retrieval={"rerank": True, "filter": {"no": 1}}))
    assert few[1]["retrieval"]["rerank"] == {"model": ranker, "candidates": 0, "tokens": 0}


async def test_both_stages_and_their_refusals(
    http: aiohttp.ClientSession, model: Generator, ranker: str
) -> None:
    """The cross-encoder scores against the rewritten question; what cannot be done is refused before any job."""
    name = await stored(http, WORDS)
    model.script = writes("w5 w9 w23")
    body = follow_up(name)
    body["retrieval"] |= {"k": 2, "rerank": True}
    status, answer, _ = await post(http, body)
    assert status == 200, answer
    assert names(answer) == ["rewrite", "embed", "search", "rerank", "prompt"]
    assert answer["retrieval"]["rerank"]["candidates"] == len(WORDS)
    documents = list(WORDS.values())
    asked = {"model": ranker, "query": "w5 w9 w23", "documents": documents}
    _, ranked, _ = await post(http, asked, "/v1/rerank")
    best = [list(WORDS)[one["index"]] for one in ranked["results"][:2]]
    assert [row["document_id"] for row in answer["retrieval"]["passages"]] == best

    works = len(model.works)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"rerank": {"model": "sim"}}, 400, "no_reranker"),
        ({"rerank": {"candidates": 1}}, 400, "invalid_value"),
        ({"rerank": {"candidates": 101}}, 400, "invalid_value"),
        ({"rerank": {"best": 3}}, 400, "unknown_field"),
        ({"rerank": 3}, 400, "invalid_value"),
        ({"rewrite": {"model": "none-such"}}, 404, "model_not_found"),
        ({"rewrite": {"max_tokens": 0}}, 400, "invalid_value"),
        ({"rewrite": {"by": "hand"}}, 400, "invalid_value"),
        ({"rewrite": "yes"}, 400, "invalid_value"),
    ]
    for retrieval, status, code in cases:
        for streamed in (False, True):
            refused = {**grounded(name, retrieval=retrieval), "stream": streamed}
            found, error, _ = await post(http, refused)
            assert (found, error["error"]["code"]) == (status, code), error
    assert len(model.works) == works


async def test_no_cross_encoder_is_said(http: aiohttp.ClientSession, mesh: Mesh) -> None:
    """Where none is served an encoder does not stand in: it has ranked the passages already."""
    async with aiohttp.ClientSession(mesh.url) as plain, generator(mesh.redis.url, mesh.directory):
        await asyncio.to_thread(mesh.wait_generator, mesh.url, NAME)
        name = await stored(plain, DOCUMENTS)
        status, error, _ = await post(plain, grounded(name, retrieval={"rerank": True}))
        async with plain.delete(f"/v1/collections/{name}") as response:
            assert response.status == 200

    assert (status, error["error"]["code"]) == (400, "no_reranker")
    assert "SPILLWAY_RERANK_MODEL" in error["error"]["message"]
