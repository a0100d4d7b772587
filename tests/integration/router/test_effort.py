"""Effort, time budgets and explanations over HTTP, of a collection that is exact and of one that has a graph."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest

from cli.main import main
from services.vector_search.index.search_path import EF_LADDER
from tests.support.mesh import Mesh

DIMENSION, ROWS = 8, 10_200  # a graph is built for 10,000 rows and more
AT_ONCE = 2040
LEAST, LARGEST = EF_LADDER[0], EF_LADDER[-1]


async def call(
    http: aiohttp.ClientSession, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    async with http.request(method, path, json=body) as response:
        return response.status, json.loads(await response.read())


async def explained(http: aiohttp.ClientSession, path: str, query: str = "") -> dict[str, Any]:
    status, told = await call(http, "GET", f"{path}/explain{query}")
    assert status == 200, told
    assert (told["object"], len(told["shards"])) == ("explanation", 1)
    return dict(told["shards"][0])


async def filled(http: aiohttp.ClientSession, rows: int) -> str:
    """Make a collection of vectors only; return its path."""
    made = f"t{uuid.uuid4().hex[:12]}"
    body = {"name": made, "model": None, "dimension": DIMENSION, "metric": "dot"}
    status, _ = await call(http, "POST", "/v1/collections", body)
    assert status == 201
    path = f"/v1/collections/{made}"
    numbers = np.random.default_rng(1).standard_normal((rows, DIMENSION)).round(3).tolist()
    for begin in range(0, rows, AT_ONCE):
        documents = [
            {"id": f"d{i}", "vector": numbers[i], "metadata": {"n": i}}
            for i in range(begin, min(begin + AT_ONCE, rows))
        ]
        status, stored = await call(http, "POST", f"{path}/documents", {"documents": documents})
        assert status == 200, stored
    return path


async def built(url: str) -> str:
    """Make a collection, and wait until its graph is built and measured."""
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(100):
        path = await filled(http, ROWS)
        while True:
            told = await explained(http, path)
            if told["path"] == "graph" and told["efforts"][-1]["predicted_ms"] is not None:
                return path
            await asyncio.sleep(0.2)


async def removed(url: str, path: str) -> None:
    async with aiohttp.ClientSession(url) as http:
        await call(http, "DELETE", path)


@pytest.fixture(scope="module")
def graph(mesh: Mesh) -> Iterator[str]:
    """A collection that has a graph."""
    path = asyncio.run(built(mesh.url))
    yield path
    asyncio.run(removed(mesh.url, path))


@pytest.fixture
async def few(http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """A collection of so few vectors that all are compared."""
    path = await filled(http, 50)
    yield path
    await call(http, "DELETE", path)


async def search(http: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    asked = {"vector": [1.0] * DIMENSION, **body}
    status, found = await call(http, "POST", f"{path}/search", asked)
    assert status == 200, found
    return dict(found)


async def test_an_effort_is_used_and_reported(http: aiohttp.ClientSession, graph: str) -> None:
    """An effort is the graph's ef, or exact; the older spellings mean the same."""
    truth = [hit["id"] for hit in (await search(http, graph, effort="exact"))["data"]]
    for asked, effort, way in (
        ({"effort": 300}, 300, "graph"),
        ({"effort": "exact"}, "exact", "exact"),
        ({"ef": 300}, 300, "graph"),
        ({"exact": True}, "exact", "exact"),
        ({"ef": 300, "exact": True}, "exact", "exact"),
    ):
        found = await search(http, graph, **asked)
        report = found["search"]
        assert (report["kind"], report["effort"], found["path"]) == ("graph", effort, way)
        assert report["took_ms"] > 0
        assert report.keys() == {"kind", "effort", "took_ms"}
        assert [hit["id"] for hit in found["data"]] == truth


async def test_a_budget_buys_as_much_effort_as_fits(
    http: aiohttp.ClientSession, graph: str, few: str
) -> None:
    """Much time buys the largest effort, none the least; an exact collection answers exactly and says if that fits."""
    much = (await search(http, graph, time_budget_ms=600_000))["search"]
    none = (await search(http, graph, time_budget_ms=0.000_1))["search"]
    assert (much["effort"], much["fits"], much["budget_ms"]) == (LARGEST, True, 600_000)
    assert 0 < much["predicted_ms"] < much["budget_ms"]
    assert (none["effort"], none["fits"]) == (LEAST, False)
    assert none["predicted_ms"] > none["budget_ms"]

    exact = (await search(http, few, time_budget_ms=0.000_1))["search"]
    assert (exact["kind"], exact["effort"], exact["fits"]) == ("exact", "exact", False)


async def test_many_queries_and_filters_keep_a_budget_too(
    http: aiohttp.ClientSession, graph: str
) -> None:
    """A batch of one request shares its budget; a filter that leaves few rows is exact at any."""
    body = {"vectors": [[1.0] * DIMENSION] * 20, "time_budget_ms": 600_000, "k": 3}
    status, many = await call(http, "POST", f"{graph}/search", body)
    assert (status, many["search"]["effort"], many["search"]["fits"]) == (200, LARGEST, True)
    assert [len(row["data"]) for row in many["data"]] == [3] * 20

    found = await search(http, graph, filter={"n": {"$lt": 20}}, time_budget_ms=600_000)
    assert (found["path"], found["search"]["effort"], len(found["data"])) == (
        "filtered-exact",
        "exact",
        10,
    )


async def test_searches_at_once_keep_their_own_budgets(
    http: aiohttp.ClientSession, graph: str
) -> None:
    """Searches with and without budgets that arrive together each get what they asked for."""
    budgets = [None, 600_000.0, 0.000_1, 500_000.0] * 8
    found = await asyncio.gather(
        *(search(http, graph, time_budget_ms=budget_ms) for budget_ms in budgets)
    )
    for budget_ms, answer in zip(budgets, found, strict=True):
        report = answer["search"]
        assert report.get("budget_ms") == budget_ms
        if budget_ms is not None:
            assert report["effort"] == (LARGEST if budget_ms > 1 else LEAST)


async def test_a_text_is_embedded_within_the_budget(http: aiohttp.ClientSession, name: str) -> None:
    """What embedding took has passed of the budget."""
    path = f"/v1/collections/{name}"
    await call(http, "POST", f"{path}/documents", {"documents": [{"text": "a cat"}]})
    status, found = await call(
        http, "POST", f"{path}/search", {"text": "cat", "time_budget_ms": 0.5}
    )
    assert (status, len(found["data"]), found["search"]["fits"]) == (200, 1, False)
    assert found["search"]["took_ms"] > 0.5


async def test_a_collection_explains_itself(
    http: aiohttp.ClientSession, graph: str, few: str
) -> None:
    """Kind and reason, the ladder with recall and predictions, and a filter's way by its selectivity."""
    exact = await explained(http, few)
    assert (exact["kind"], exact["effort"], exact["live"]) == ("exact", "exact", 50)
    assert "fewer than 10,000" in exact["why"]
    assert [rung["effort"] for rung in exact["efforts"]] == ["exact"]

    told = await explained(http, graph, "?k=5")
    assert (told["kind"], told["live"]) == ("graph", ROWS)
    assert told["bytes"]["graph"] > told["bytes"]["rows"] > ROWS * DIMENSION * 4
    efforts = [rung["effort"] for rung in told["efforts"]]
    assert efforts == sorted(efforts)
    assert told["effort"] in efforts
    for low, way in ((9_000, "filtered-graph"), (20, "filtered-exact")):
        condition = {"n": {"$lt": low}}
        filtered = await explained(http, graph, f"?filter={quote(json.dumps(condition))}")
        met = filtered["filter"]
        assert (met["matching"], met["path"]) == (low, way)
        assert met["selectivity"] == pytest.approx(low / ROWS, abs=1e-5)
        assert (await search(http, graph, filter=condition))["path"] == way


async def test_the_command_line_shows_it(
    mesh: Mesh, graph: str, few: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`spillway explain` prints the reason, the ladder and a filter's way; what is wrong is said."""

    async def said(*words: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, [*words, "--url", mesh.url])
        told = capsys.readouterr()
        return status, told.out + told.err

    name = graph.rsplit("/", 1)[-1]
    status, text = await said("explain", name, "--filter", '{"n": {"$lt": 20}}')
    assert status == 0
    assert f"shard 0: graph\n  {ROWS:,} live vectors of 8 dimensions, at least 10,000" in text
    assert re.search(r"^ +1024 +\S+ +\d+\.\d{3}  filtered-exact$", text, re.MULTILINE)
    assert "the filter allows 20 (0.20%), and goes by filtered-exact" in text
    status, text = await said("explain", few.rsplit("/", 1)[-1])
    assert (status, "shard 0: exact" in text) == (0, True)

    assert await said("explain", name, "--filter", "[]") == (
        2,
        "spillway: --filter is '[]'; expected a JSON object\n",
    )
    status, text = await said("search", name, "x", "--effort", "much")
    assert (status, "--effort is 'much'; expected a number from 1 on" in text) == (2, True)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"effort": 0}, "effort", ">= 1"),
        ({"effort": 10_001}, "effort", "<= 10000"),
        ({"effort": "most"}, "effort", "'most'"),
        ({"effort": True}, "effort", "int | str | null"),
        ({"time_budget_ms": 0}, "time_budget_ms", "> 0"),
        ({"time_budget_ms": 600_001}, "time_budget_ms", "<= 600000"),
        ({"time_budget_ms": "soon"}, "time_budget_ms", "float"),
        ({"effort": 10, "time_budget_ms": 5}, "time_budget_ms", "effort and time_budget_ms are"),
        ({"effort": 10, "ef": 10}, "ef", "effort and ef are given: expected at most one of"),
        ({"effort": "exact", "exact": True}, "exact", "effort and exact are given"),
        ({"time_budget_ms": 5, "ef": 10}, "ef", "time_budget_ms and ef are given"),
    ],
)
async def test_efforts_that_make_no_sense(
    http: aiohttp.ClientSession, few: str, body: Any, param: str, says: str
) -> None:
    """Each is a 400 that says what, where, and what is expected."""
    asked = {"vector": [1.0] * DIMENSION, **body}
    status, told = await call(http, "POST", f"{few}/search", asked)

    error = told["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_value", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("?k=0", "invalid_value", "k"),
        ("?k=10001", "invalid_value", "k"),
        ("?k=many", "invalid_value", "k"),
        ("?filter=%7B", "invalid_filter", "filter"),
        ("?filter=%5B%5D", "invalid_filter", "filter"),
        ("?filter=%7B%22%24nope%22%3A1%7D", "invalid_filter", "filter"),
    ],
)
async def test_explanations_that_make_no_sense(
    http: aiohttp.ClientSession, few: str, query: str, code: str, param: str
) -> None:
    """Bad counts and filters are a 400 with a code; a collection that is not there is a 404."""
    status, told = await call(http, "GET", f"{few}/explain{query}")
    assert (status, told["error"]["code"], told["error"].get("param")) == (400, code, param)

    status, told = await call(http, "GET", "/v1/collections/nothing-here/explain")
    assert (status, told["error"]["code"]) == (404, "collection_not_found")
