from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.wire.search import DocumentsWork
from services.vector_search.filters import MAX_DEPTH, Filter, attributes
from tests.support.vectors import DIMENSION, ask, document, nearness, settle, shard, write

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([0.5, 1.0, -0.0, 2**63, -(2**63), 2**53 + 1, float(2**53)]),
    st.sampled_from(["", "a", "b", "ä", "1", "\x00z", "😀"]),
)
names = st.sampled_from(["a", "b", "a.b", "c"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
metadatas = st.dictionaries(names, values, max_size=3)
ordered = st.one_of(st.integers(-2, 3), st.floats(-2, 3), st.sampled_from(["", "a", "ä"]))
operators = st.one_of(
    st.tuples(st.sampled_from(["$eq", "$ne"]), scalars),
    st.tuples(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), ordered),
    st.tuples(st.sampled_from(["$in", "$nin"]), st.lists(scalars, max_size=3)),
    st.tuples(st.just("$exists"), st.booleans()),
).map(lambda pair: dict([pair]))
fields = st.dictionaries(names, scalars | operators, max_size=2)
conditions = st.recursive(
    fields,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"$and": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"$or": parts}),
        inner.map(lambda part: {"$not": part}),
    ),
    max_leaves=5,
)


@given(st.lists(metadatas, max_size=8), st.lists(conditions, min_size=1, max_size=5))
def test_sql_and_predicate_agree(tmp_path_factory: Any, found: Any, asked: Any) -> None:
    """A filter matches the same documents as SQL over the attribute index and as a predicate."""
    one = shard(tmp_path_factory.mktemp("s"))
    docs = [document(str(i), np.ones(DIMENSION), None, **m) for i, m in enumerate(found)]
    one.apply("1-0", write(0, docs))
    one.sync()
    for source in asked:
        condition = Filter(source)
        listed = one.documents(DocumentsWork(collection="c1", op="list", filter=source or None))
        expected = [
            str(i)
            for i, metadata in enumerate(found)
            if condition.matches(attributes(msgspec.json.decode(msgspec.json.encode(metadata))))
        ]
        assert sorted(d.id for d in listed.documents) == sorted(expected)
    one.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"n": 1}, {"int"}),
        ({"n": True}, {"bool"}),
        ({"n": None}, {"null"}),
        ({"n": "1"}, {"text"}),
        ({"n": {"$ne": 1}}, {"bool", "null", "text", "list", "missing", "deep"}),
        ({"n": {"$gt": 0}}, {"int", "list"}),
        ({"n": {"$exists": False}}, {"missing"}),
        ({"n": {"$exists": True}}, {"int", "bool", "null", "text", "list", "deep"}),
        ({"n": {"$in": [7, "1"]}}, {"text", "list"}),
        ({"n": {"$nin": [7, "1"]}}, {"int", "bool", "null", "missing", "deep"}),
        ({"n.m": "x"}, {"deep"}),
        ({"n": {"$gte": 1, "$lte": 1}}, {"int"}),
        ({"$or": [{"n": 1}, {"n.m": {"$eq": "x"}}]}, {"int", "deep"}),
        ({"$not": {"n": {"$exists": True}}}, {"missing"}),
        ({"$and": [{"n": {"$gt": 0}}, {"n": {"$gt": 5}}]}, {"list"}),
    ],
)
def test_what_a_filter_means(tmp_path: Path, source: Any, expected: set[str]) -> None:
    """`true` is not 1, a list matches by any element, a missing field matches only $ne, $nin and $exists: false."""
    cases: dict[str, dict[str, Any]] = {
        "int": {"n": 1},
        "bool": {"n": True},
        "null": {"n": None},
        "text": {"n": "1"},
        "list": {"n": [7, 9]},
        "missing": {},
        "deep": {"n": {"m": "x"}},
    }
    one = shard(tmp_path)
    one.apply(
        "1-0", write(0, [document(k, np.ones(DIMENSION), None, **v) for k, v in cases.items()])
    )
    one.sync()
    found = one.search(ask(np.ones(DIMENSION), 100, filter=source))
    assert {hit.id for hit in found.hits[0]} == expected
    one.close()


def _deep(levels: int) -> dict[str, Any]:
    source: dict[str, Any] = {"a": 1}
    for _ in range(levels):
        source = {"$not": {"$or": [source, {"b": 2}]}}
    return source


@pytest.mark.parametrize(
    "source",
    [
        {"$where": "1"},
        {"a": {"$regex": "x"}},
        {"a": [1]},
        {"a": {}},
        {"a": {"$in": 1}},
        {"a": {"$in": [[1]]}},
        {"a": {"$gt": None}},
        {"a": {"$gt": True}},
        {"a": {"$exists": 1}},
        {"$and": []},
        {"$or": {"a": 1}},
        {"$not": 3},
        {"a": {"$in": list(range(1001))}},
        {"$or": [{"a": i} for i in range(257)]},
        {"$or": [{"a": {"$in": list(range(1000))}} for _ in range(20)]},
        _deep(MAX_DEPTH),
    ],
)
def test_bad_filters_are_refused(source: Any) -> None:
    """An unknown operator, a wrong operand, or too much of anything: `invalid_filter`."""
    with pytest.raises(InvalidRequest) as caught:
        Filter(source)
    assert (caught.value.code, caught.value.param) == ("invalid_filter", "filter")


def test_the_largest_filters_run(tmp_path: Path) -> None:
    """Whatever the limits allow, SQLite can execute."""
    one = shard(tmp_path)
    one.apply("1-0", write(0, [document("a", np.ones(DIMENSION), None, a=1)]))
    one.sync()
    wide = {"$or": [{"a": {"$in": list(range(i, i + 60))}} for i in range(256)]}
    tight = {"$and": [{"a": {"$ne": i + 2}} for i in range(256)]}
    for source in (wide, tight, _deep(MAX_DEPTH // 2 - 1)):
        assert len(one.search(ask(np.ones(DIMENSION), 1, filter=source)).hits[0]) in (0, 1)
    assert one.search(ask(np.ones(DIMENSION), 1, filter=tight)).hits[0][0].id == "a"
    one.close()


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("exact_below", [10_000, 200])
def test_filtered_search_never_under_returns(
    tmp_path: Path, metric: str, exact_below: int, seed: int
) -> None:
    """At 50, 10, 1 and 0.1 % and under upserts and deletes: k hits whenever k match, recall@10 >= 0.95."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((8, DIMENSION))
    one = shard(tmp_path, metric, exact_below=exact_below)
    held: dict[str, tuple[Any, int]] = {}
    hits = wanted = turn = 0
    for turn in range(6):
        docs = []
        for name in rng.choice(4000, size=700, replace=False):
            vector = rng.standard_normal(8) @ latent
            held[str(name)] = (vector, int(rng.integers(1000)))
            docs.append(document(str(name), vector, None, n=held[str(name)][1]))
        gone = [str(name) for name in rng.choice(4000, size=150, replace=False)]
        for name in gone:
            held.pop(name, None)
        one.apply(f"{turn + 1}-0", write(turn, docs))
        one.apply(f"{turn + 1}-1", write(turn + 100, deletes=gone))
        one.sync()
        for _ in range(int(rng.integers(40))):
            one.maintain()
        ids = np.array(list(held))
        matrix, ns = (
            np.array([v for v, _ in held.values()]),
            np.array([n for _, n in held.values()]),
        )
        for limit in (500, 100, 10, 1):
            query = rng.standard_normal(8) @ latent
            scores = nearness(query, matrix, metric)
            scores[ns >= limit] = -np.inf
            matching = int((ns < limit).sum())
            truth = set(ids[np.argsort(-scores)[: min(10, matching)]])
            found = one.search(ask(query, 10, filter={"n": {"$lt": limit}}))
            got = {hit.id for hit in found.hits[0]}
            assert len(found.hits[0]) == len(got) == min(10, matching), (limit, found.path)
            assert all(held[name][1] < limit for name in got)
            hits, wanted = hits + len(truth & got), wanted + len(truth)
    assert hits >= 0.95 * wanted
    settle(one)
    one.close()
