"""/v1/embeddings, /v1/models and /v1/rerank, with the official client where it has a call for them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import uuid
from array import array
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from common.bus import Bus
from common.ids import Family
from common.registry.models import Models
from common.types.model_card import ModelCard
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from engine.models.encoders.files import find
from tests.support.mesh import Mesh
from tests.support.scripted_generator import known


@pytest.fixture
def client(mesh: Mesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_embeds(client: openai.AsyncOpenAI) -> None:
    """Its default (base64) and float give the same numbers, in the order of the inputs, with usage."""
    async with client:
        packed = await client.embeddings.create(model="sim", input=["one", "two words"])
        plain = await client.embeddings.create(
            model="sim", input=["one", "two words"], encoding_format="float"
        )

    assert [item.index for item in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert len(one.embedding) == 384
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 7


async def test_many_texts_come_back_in_order(client: openai.AsyncOpenAI) -> None:
    """A request of many parcels equals its texts one by one."""
    texts = [f"text number {index}" for index in range(100)]
    async with client:
        many = await client.embeddings.create(model="sim", input=texts)
        last = await client.embeddings.create(model="sim", input=texts[99])

    assert len(many.data) == 100
    assert many.data[99].embedding == pytest.approx(last.data[0].embedding, abs=1e-5)


async def test_token_lists_equal_their_text(http: aiohttp.ClientSession) -> None:
    """A text's own token ids give its embedding."""
    ids = [101, 7592, 102]  # [CLS] hello [SEP]
    rows = []
    for given in ("hello", ids, [ids]):
        async with http.post("/v1/embeddings", json={"input": given}) as response:
            assert response.status == 200
            rows.append((await response.json())["data"][0]["embedding"])

    assert rows[0] == rows[1] == rows[2]


async def test_dimensions_cut_and_renormalise(http: aiohttp.ClientSession) -> None:
    """`dimensions` keeps the first numbers at length 1."""
    body = {"input": "hello", "dimensions": 16, "encoding_format": "base64"}
    async with http.post("/v1/embeddings", json=body) as response:
        packed = base64.b64decode((await response.json())["data"][0]["embedding"])
    row = array("f", packed)

    assert len(row) == 16
    assert math.sqrt(sum(x * x for x in row)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"input": "x", "model": "nobody"}, 404, "model_not_found"),
        ({"input": ""}, 400, "empty_input"),
        ({"input": []}, 400, "empty_input"),
        ({"input": ["a", ""]}, 400, "empty_input"),
        ({"input": ["a", 1]}, 400, "invalid_value"),
        ({"input": [[]]}, 400, "empty_input"),
        ({"input": [-1]}, 400, "invalid_token"),
        ({"input": [10**9]}, 400, "invalid_token"),
        ({"input": {"a": 1}}, 400, "invalid_value"),
        ({"input": "x", "dimensions": 385}, 400, "invalid_dimensions"),
        ({"input": "x", "dimensions": 0}, 400, "invalid_value"),
        ({"input": "x", "encoding_format": "hex"}, 400, "invalid_value"),
        ({"input": "word " * 400}, 400, "context_length_exceeded"),
        ({"input": ["x"] * 2049}, 400, "too_many_items"),
        ({"model": "sim"}, 400, "invalid_value"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    http: aiohttp.ClientSession, body: object, status: int, code: str
) -> None:
    """Every wrong input is a clear error in OpenAI's shape."""
    async with http.post("/v1/embeddings", json=body) as response:
        error = (await response.json())["error"]

        assert (status, code) == (response.status, error["code"])
        assert error["message"]
        assert response.headers["x-request-id"]


async def test_errors_reach_the_official_client(client: openai.AsyncOpenAI) -> None:
    """The client raises its own class, with code and request id."""
    async with client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="nobody", input="x")

    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


async def test_models_are_listed(client: openai.AsyncOpenAI, bus: Bus) -> None:
    """The official client lists and gets models; an unknown one is a 404."""
    async with client:
        listed = await client.models.list()
        one = await client.models.retrieve("sim")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nobody")

    assert [model.id for model in listed.data] == sorted(await Models(bus).cards())
    assert one.id == "sim"


async def test_rerank_answers_in_the_asked_shape(http: aiohttp.ClientSession) -> None:
    """Cohere's and TEI's bodies give the same scores, best first."""
    texts = ["cars are fast", "cats", "the cat sat"]
    body = {"query": "cats", "documents": [texts[0], {"text": texts[1]}, texts[2]], "top_n": 2}
    async with http.post("/v1/rerank", json={**body, "return_documents": True}) as response:
        cohere = await response.json()
    async with http.post(
        "/rerank", json={"query": "cats", "texts": texts, "return_text": True}
    ) as response:
        tei = await response.json()

    assert [1, texts[1]] == [
        cohere["results"][0]["index"],
        cohere["results"][0]["document"]["text"],
    ]
    assert len(cohere["results"]) == 2
    assert [tei[0]["index"], len(tei)] == [1, 3]
    assert cohere["results"][0]["relevance_score"] == pytest.approx(tei[0]["score"])
    assert cohere["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


async def test_the_default_reranker_is_named_as_the_workers_are_told(mesh: Mesh) -> None:
    """A hub id or a directory stands for the name that model is served under."""
    router = mesh.add_router("reranks", "--rerank-model", "someone/Sim")
    body = {"query": "a", "documents": ["a"]}
    async with (
        aiohttp.ClientSession(mesh.address(router)) as http,
        http.post("/v1/rerank", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    router.stop()


async def test_many_documents_are_reranked(http: aiohttp.ClientSession) -> None:
    """More documents than one job holds are scored against the same query."""
    texts = [f"text {index}" for index in range(80)]
    async with http.post("/v1/rerank", json={"query": "text 70", "documents": texts}) as response:
        results = (await response.json())["results"]

    assert results[0]["index"] == 70
    assert sorted(range(80)) == sorted(item["index"] for item in results)


async def test_what_cannot_be_done_in_time_is_refused_with_the_wait(
    http: aiohttp.ClientSession,
) -> None:
    """A deadline no lane can meet is a 429 with a computed Retry-After; one that is over already a 504."""
    body = {"input": [f"text {index}" for index in range(32)]}
    async with http.post(
        "/v1/embeddings", json=body, headers={"Spillway-Timeout": "0.009"}
    ) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) in {(429, "deadline"), (504, "deadline_exceeded")}
        if response.status == 429:
            assert 1 <= int(response.headers["Retry-After"]) <= 60
    body = {"input": [f"text {index}" for index in range(2000)]}
    async with http.post(
        "/v1/embeddings", json=body, headers={"Spillway-Timeout": "0.3"}
    ) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (429, "deadline")
        assert 1 <= int(response.headers["Retry-After"]) <= 60


@pytest.fixture
async def few(http: aiohttp.ClientSession, bus: Bus) -> AsyncIterator[str]:
    """An encoder that holds 64 items and takes none: what is admitted waits. Its model's name, new each time."""
    name = f"zz-few-{uuid.uuid4().hex[:8]}"  # by name the last one: never the default
    card = ModelCard(
        name=name,
        kind="embed",
        family=f"embed.{name}",
        fingerprint="fe" * 16,
        dimension=4,
        max_tokens=512,
    )
    await Models(bus).publish(card, find("").tokenizer_json())
    record = WorkerRecord(
        worker=incarnation_name("gpu"), classes=["gpu"], device="cpu", depth_items=64,
        depth_tokens=100_000, alpha_items_s=0.05, fingerprint=card.fingerprint, limit_items=256,
        limit_tokens=8192, slo_s=2.0,
    )  # fmt: skip
    worker = Worker(bus, Family(f"embed.{name}"), record)
    await worker.start()
    await known(http, name)
    yield name
    await worker.stop()
    await bus.connection.call("SREM", "models", name)
    await bus.connection.call("DEL", f"model:{name}")
    await known(http, name, status=404)


async def refused(
    http: aiohttp.ClientSession, model: str, texts: int, **headers: str
) -> tuple[int, str]:
    """Send a request that must be refused; return its status and code."""
    body = {"input": ["x"] * texts, "model": model}
    async with http.post("/v1/embeddings", json=body, headers=headers) as got:
        return got.status, (await got.json())["error"]["code"]


@contextlib.asynccontextmanager
async def waiting(
    http: aiohttp.ClientSession, bus: Bus, model: str, texts: int, **headers: str
) -> AsyncIterator[None]:
    """Send a request that must be admitted, and leave it when done; TimeoutError if it does not enter."""
    family, body = Family(f"embed.{model}"), {"input": ["x"] * texts, "model": model}
    before = (await bus.lanes.use(family)).get("gpu", (0, 0))[0]
    task = asyncio.ensure_future(http.post("/v1/embeddings", json=body, headers=headers))
    try:
        async with asyncio.timeout(60):
            while (await bus.lanes.use(family)).get("gpu", (0, 0))[0] < before + min(texts, 32):
                assert not task.done(), await task
                await asyncio.sleep(0.02)
        yield
    finally:
        task.cancel()
        async with asyncio.timeout(60):
            while (await bus.lanes.use(family)).get("gpu", (0, 0))[0] > before:  # noqa: ASYNC110 - no event of it
                await asyncio.sleep(0.02)


async def test_deadlines_and_classes_decide(
    http: aiohttp.ClientSession, bus: Bus, few: str
) -> None:
    """An own deadline decides, else the lane's objective; low priority is refused while normal still enters."""
    late = (429, "deadline")
    async with waiting(http, bus, few, 25):  # 1.25 s of work, which nobody does
        assert await refused(http, few, 2, **{"Spillway-Priority": "low"}) == late
        async with waiting(http, bus, few, 2):
            pass
        assert await refused(http, few, 20) == late
        assert await refused(http, few, 20, **{"Spillway-Timeout": "1.5"}) == late
        async with waiting(http, bus, few, 20, **{"Spillway-Timeout": "30"}):
            pass
        odd = await refused(http, few, 1, **{"Spillway-Priority": "high"})
        assert odd == (400, "invalid_header")


async def test_all_or_nothing(http: aiohttp.ClientSession, bus: Bus, few: str) -> None:
    """With all_or_nothing texts that do not all fit are refused at once; without it they enter bit by bit."""
    body: dict[str, object] = {"input": ["x"] * 96, "model": few}
    async with http.post("/v1/embeddings", json=body | {"all_or_nothing": True}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "deadline")
        assert int(response.headers["Retry-After"]) >= 1
    async with waiting(http, bus, few, 96):
        pass
