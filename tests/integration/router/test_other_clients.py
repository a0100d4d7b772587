"""The shapes of other servers (Cohere, TEI, vLLM), and the settings by which clients written for them work here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest
import yaml

from services.router.text.tokens import load
from tests.support.chat import CHAT, post
from tests.support.mesh import ROOT, Mesh

TEXTS = ["cars are fast", "cats", "the cat sat"]
LONG = "word " * 400
PAGE = "https://page.example"
SETTINGS = (
    ("--model-aliases", "gpt-4o=sim-chat, small=sim, sim-chat=sim, gone=nobody"),
    ("--cors-origins", f"{PAGE},http://localhost:3000"),
    ("--truncate", "--public-metrics", "--public-openapi"),
)


@pytest.fixture(scope="module")
def told(chatting: Mesh) -> Iterator[str]:
    """The URL of a router with every setting for clients of other servers."""
    router = chatting.add_router("told", *(word for pair in SETTINGS for word in pair))
    url = chatting.address(router)
    chatting.wait_ready(url)
    chatting.wait_model(url, "generate")
    chatting.wait_model(url, "embed")
    yield url
    assert router.stop() == 0


@pytest.fixture
async def there(told: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(told) as session:
        yield session


async def _ok(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    status, found, _ = await post(http, body, path)
    assert status == 200, found
    return found


async def _vectors(http: aiohttp.ClientSession, inputs: Any, **more: Any) -> list[list[float]]:
    found = await _ok(http, "/v1/embeddings", {"input": inputs, "model": "sim", **more})
    return [item["embedding"] for item in found["data"]]


# -- Cohere and TEI ------------------------------------------------------------------------------------------


async def test_scores_are_the_same_in_every_shape(http: aiohttp.ClientSession) -> None:
    """Cohere's second version scores as the first does; a document cut to its first tokens scores as those alone."""
    body = {"query": "cats", "model": "sim", "documents": [TEXTS[0], TEXTS[1], {"text": TEXTS[2]}]}
    first = await _ok(http, "/v1/rerank", body)
    second = await _ok(http, "/v2/rerank", {**body, "top_n": 2})
    cut = await _ok(http, "/v2/rerank", {**body, "max_tokens_per_doc": 1})
    alone = await _ok(http, "/v2/rerank", {**body, "documents": ["cars", "cats", "the"]})

    assert second["results"] == first["results"][:2]
    assert second["meta"]["tokens"]["input_tokens"] == first["usage"]["total_tokens"]
    assert cut["results"] == alone["results"]


async def test_vectors_are_the_same_in_every_shape(http: aiohttp.ClientSession) -> None:
    """TEI's bare list holds the vectors that OpenAI's shape holds, for texts and for token ids."""
    ids = [101, 7592, 102]
    tei = {"inputs": TEXTS, "model": "sim", "truncate": None, "normalize": True}

    assert await _ok(http, "/embed", tei) == await _vectors(http, TEXTS)
    assert await _ok(http, "/embed", {**tei, "inputs": TEXTS[0]}) == await _vectors(http, TEXTS[0])
    assert await _ok(http, "/embed", {**tei, "inputs": [ids]}) == await _vectors(http, [ids])
    assert await _ok(http, "/embed", {**tei, "dimensions": 4}) == await _vectors(
        http, TEXTS, dimensions=4
    )


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/embed", {"inputs": "x", "normalize": False}, "unsupported"),
    ("/embed", {"inputs": "x", "truncation_direction": "left"}, "unsupported"),
    ("/embed", {"inputs": "x", "prompt_name": "query"}, "invalid_value"),
    ("/embed", {"inputs": [1, "x"]}, "invalid_value"),
    ("/embed", {"inputs": LONG}, "context_length_exceeded"),
    ("/embed", {"inputs": [101] * 600}, "context_length_exceeded"),
    ("/embed", {"inputs": "x", "dimensions": 4000}, "invalid_dimensions"),
    ("/v2/rerank", {"query": " ", "documents": ["x"]}, "empty_input"),
    ("/v2/rerank", {"query": "x", "documents": []}, "empty_input"),
    ("/v2/rerank", {"query": "x"}, "invalid_value"),
    ("/tokenize", {}, "invalid_value"),
    ("/tokenize", {"prompt": "x", "inputs": "x"}, "invalid_value"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, "invalid_value"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "unsupported"),
    ("/tokenize", {"inputs": ["x"] * 2049}, "too_many_items"),
    ("/detokenize", {"tokens": [10**9], "model": "sim"}, "invalid_token"),
    ("/detokenize", {"tokens": [-1], "model": "sim"}, "invalid_token"),
    ("/detokenize", {"ids": [[1], 2]}, "invalid_value"),
    ("/decode", {"ids": [[]]}, "empty_input"),
    ("/decode", {}, "invalid_value"),
]


async def test_what_another_server_takes_and_this_one_cannot_is_said(chatting: Mesh) -> None:
    """Every field that would change the answer and is not supported is a 400 that names it."""
    async with aiohttp.ClientSession(chatting.url) as http:
        for path, body, code in BAD:
            status, found, _ = await post(http, body, path)
            assert (status, found["error"]["code"]) == (400, code), (path, body, found)


async def test_info_tells_the_limits_of_the_default_encoder(
    http: aiohttp.ClientSession, there: aiohttp.ClientSession
) -> None:
    """What TEI's clients look at before they cut their inputs into batches."""
    async with http.get("/info") as plain, there.get("/info") as cutting:
        found, other = await plain.json(), await cutting.json()

    async with http.get(f"/v1/models/{found['model_id']}") as response:
        model = await response.json()
    assert found["max_input_length"] == model["max_model_len"] == model["max_tokens"]
    assert (found["model_sha"], found["max_client_batch_size"]) == (model["fingerprint"], 2048)
    assert (found["auto_truncate"], other["auto_truncate"]) == (False, True)


# -- token ids -----------------------------------------------------------------------------------------------


async def test_token_ids_are_those_that_requests_count(chatting: Mesh) -> None:
    """A prompt's and a conversation's token ids are as many as their answers' usage says, and stand for their text."""
    said = [{"role": "user", "content": "What is a spillway?"}]
    async with aiohttp.ClientSession(chatting.url) as http:
        prompt = await _ok(http, "/tokenize", {"prompt": "The dam", "return_token_strs": True})
        talk = await _ok(http, "/tokenize", {"messages": said, "model": "sim-chat"})
        plain = await _ok(http, "/v1/completions", {"prompt": "The dam", "max_tokens": 1})
        chat = await _ok(http, CHAT, {"messages": said, "max_tokens": 1})
        text = await _ok(http, "/detokenize", {"tokens": talk["tokens"]})

    assert prompt["count"] == len(prompt["tokens"]) == len(prompt["token_strs"])
    assert prompt["count"] == plain["usage"]["prompt_tokens"]
    assert talk["count"] == len(talk["tokens"]) == chat["usage"]["prompt_tokens"]
    assert said[0]["content"] in text["prompt"]


async def test_tei_tells_where_tokens_stand(http: aiohttp.ClientSession) -> None:
    """Tokens are slices of their text; special ones have no place; their ids are the text's, and decode to it."""
    texts = ["Größe matters", "cats"]
    found = await _ok(http, "/tokenize", {"inputs": texts, "model": "sim"})
    bare = await _ok(
        http, "/tokenize", {"inputs": texts[1], "model": "sim", "add_special_tokens": False}
    )
    ids = [[token["id"] for token in one] for one in found]
    back = await _ok(http, "/decode", {"ids": ids, "model": "sim"})
    marked = await _ok(
        http, "/decode", {"ids": ids[1], "model": "sim", "skip_special_tokens": False}
    )

    for text, one in zip(texts, found, strict=True):
        assert one[0]["special"] is one[-1]["special"] is True
        assert all(token["text"] == text[token["start"] : token["stop"]] for token in one[1:-1])
        assert (one[0]["start"], one[0]["stop"]) == (None, None)
    assert [token["id"] for token in bare[0]] == ids[1][1:-1]
    assert back[1] == "cats"
    assert marked == ["[CLS] cats [SEP]"]


# -- settings ------------------------------------------------------------------------------------------------


async def test_an_alias_is_a_models_other_name(told: str, there: aiohttp.ClientSession) -> None:
    """Aliases are listed, served and answered by the model's own name; a served model's name is no alias."""
    async with openai.AsyncOpenAI(base_url=f"{told}/v1", api_key="none", max_retries=0) as client:
        listed = {model.id: model for model in (await client.models.list()).data}
        vector = await client.embeddings.create(model="small", input="cats")
        answer = await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "hello"}], max_tokens=2
        )
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="gone", input="cats")
    made = await there.post("/v1/sessions", json={"model": "gpt-4o"})
    session = (await made.json())["id"]
    body = {"model": "gpt-4o", "session": session, "max_tokens": 2}
    turn = await _ok(there, CHAT, {**body, "messages": [{"role": "user", "content": "hello"}]})

    assert {"gpt-4o", "small", "sim", "sim-chat"} <= set(listed)
    assert "gone" not in listed
    roots = {name: getattr(listed[name], "root", None) for name in ("gpt-4o", "small", "sim-chat")}
    assert roots == {"gpt-4o": "sim-chat", "small": "sim", "sim-chat": "sim-chat"}
    assert (vector.model, answer.model, turn["model"]) == ("sim", "sim-chat", "sim-chat")


async def test_texts_are_cut_where_the_server_is_told_so(there: aiohttp.ClientSession) -> None:
    """A text too long equals its beginning, token ids keep their closing token, and a request may refuse instead."""
    encoder = load(await _tokenizer(there))
    limit = 512
    whole = encoder.texts([LONG * 2], limit, truncate=True, param="input")[0].ids
    assert len(whole) == limit
    assert encoder.shortened([*whole[:-1], *whole[1:]], limit) == whole
    rows = [
        await _vectors(there, LONG * 2),
        await _vectors(there, [*whole[:-1], 2773, 102]),
        await _vectors(there, [whole]),
    ]
    assert rows[0] == rows[1] == rows[2]
    status, found, _ = await post(there, {"input": LONG * 2, "truncate": False}, "/v1/embeddings")
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


async def _tokenizer(http: aiohttp.ClientSession) -> str:
    from engine.models.encoders.files import find

    return str(find("").directory / "tokenizer.json")


async def test_pages_of_named_origins_may_call(told: str, http: aiohttp.ClientSession) -> None:
    """A preflight is answered without a key; whole answers, errors and streams carry the headers; others have none."""
    ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    wish = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = "Access-Control-Allow-Origin"
    async with aiohttp.ClientSession(told) as there:
        async with there.options(CHAT, headers=wish) as got:
            assert (got.status, got.headers[allowed]) == (204, PAGE)
            assert got.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in got.headers["Access-Control-Allow-Methods"]
        for path, body, status in (
            (CHAT, ask, 200),
            (CHAT, {**ask, "stream": True}, 200),
            (CHAT, {}, 400),
            ("/nothing", {}, 404),
        ):
            async with there.post(path, json=body, headers={"Origin": PAGE}) as got:
                assert (got.status, got.headers[allowed]) == (status, PAGE), path
                assert "x-request-id" in got.headers["Access-Control-Expose-Headers"]
            async with there.post(
                path, json=body, headers={"Origin": "https://evil.example"}
            ) as got:
                assert (got.status, got.headers.get(allowed)) == (status, None)
                assert got.headers["Vary"] == "Origin"
    async with http.get("/v1/models", headers={"Origin": PAGE}) as got:
        assert allowed not in got.headers


async def test_searches_of_pages_carry_the_headers(there: aiohttp.ClientSession) -> None:
    """A search's reply goes another way than others, at first and once its head is known."""
    made = {"name": "across", "dimension": 2, "model": None}
    async with there.post("/v1/collections", json=made) as got:
        assert got.status == 201
    for _ in range(3):
        body = {"vector": [0, 1]}
        path = "/v1/collections/across/search"
        async with there.post(path, json=body, headers={"Origin": PAGE}) as got:
            assert (got.status, got.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
    async with there.delete("/v1/collections/across") as got:
        assert got.status == 200


async def test_descriptions_are_there_where_they_are_wanted(
    http: aiohttp.ClientSession, there: aiohttp.ClientSession
) -> None:
    """/metrics and /openapi.json are unknown as shipped; where they are on they tell the counts and the document."""
    for path in ("/metrics", "/openapi.json"):
        async with http.get(path) as got:
            assert (got.status, (await got.json())["error"]["code"]) == (404, "route_not_found")
    async with there.get("/metrics") as got:
        assert "spillway_requests_total" in await got.text()
        assert got.content_type == "text/plain"
    async with there.get("/openapi.json") as got:
        document = await got.json()

    assert document == json.loads(
        json.dumps(yaml.safe_load((ROOT / "docs/openapi.yaml").read_text()))
    )


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("--model-aliases", "gpt-4o", "expected alias=model"),
        ("--model-aliases", "a=b,a=c", "twice"),
        ("--cors-origins", "example.org", "scheme://host"),
        ("--cors-origins", "https://a.example/path", "scheme://host"),
    ],
)
async def test_a_setting_that_makes_no_sense_ends_the_start(
    mesh: Mesh, flag: str, text: str, expected: str
) -> None:
    """The router says which part of the setting is wrong, and does not start."""
    router = mesh.add_router("wrong", flag, text)
    assert router.process is not None
    assert await asyncio.to_thread(router.process.wait, 60) != 0
    assert expected in router.log.read_text()


async def test_too_long_is_said_in_the_words_that_clients_know(chatting: Mesh) -> None:
    """Libraries recognise an overflow by its first words, or by its code in the text of the error."""
    client = openai.AsyncOpenAI(base_url=f"{chatting.url}/v1", api_key="none", max_retries=0)
    long = "word " * 200_000
    async with client:
        calls: list[Any] = [
            client.chat.completions.create(
                model="sim-chat", messages=[{"role": "user", "content": long[: 5 * count]}]
            )
            for count in (60_000, 200_000)
        ]
        calls += [client.embeddings.create(model="sim", input=long[:n]) for n in (4000, 900_000)]
        calls.append(client.completions.create(model="sim-chat", prompt=long))
        for call in calls:
            with pytest.raises(openai.BadRequestError) as caught:
                await call
            text = str(caught.value)
            assert caught.value.code == "context_length_exceeded"
            assert "This model's maximum context length is " in text
            assert "However, " in text
            assert "(context_length_exceeded)" in text
