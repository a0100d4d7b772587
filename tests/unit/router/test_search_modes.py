"""Bodies of searches by vector, by text and by both: what each mode takes, and what it refuses."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequest
from common.registry.layout import ShardLayout
from common.wire.registry import CollectionRecord
from common.wire.search import Diversity, Hit, SearchWork
from common.wire.workflows import SearchRequest
from services.router.text import collections
from services.router.text.bodies import RequestLimits
from services.router.text.passages import interleaved
from services.router.workflows.search import search_parcels

LIMITS = RequestLimits(2048, 100_000, 32, 8192)
ROW = [0.5, -1.25, 3.0]


def _ask(**body: Any) -> SearchRequest:
    return collections.search(
        msgspec.json.encode(body), 3, "cosine", LIMITS, spec=None, prompt="query: "
    )


def test_words_need_no_encoder() -> None:
    """Mode text takes texts of a collection without an encoder, as they are, without the query's prompt."""
    ask = _ask(texts=["one", "two"], mode="text", k=3)
    assert (ask.mode, ask.texts, ask.tokens, ask.vectors) == ("text", ["one", "two"], [], b"")
    assert (ask.count, ask.many, ask.depth) == (2, True, 0)


def test_hybrid_takes_a_vector_beside_the_text() -> None:
    """Who embeds alone gives both; enough candidates of each search are ranked."""
    ask = _ask(text="one", vector=ROW, mode="hybrid", k=40)
    assert (ask.texts, ask.vectors) == (["one"], array("f", ROW).tobytes())
    assert (ask.depth, ask.many) == (80, False)
    both = _ask(texts=["a", "b"], vectors=[ROW, ROW], mode="hybrid", mmr={"candidates": 120})
    assert (both.count, both.depth, both.mmr) == (2, 120, Diversity(0.5, 120))


def test_scores_and_diversity_need_candidates() -> None:
    """A search whose own order is the result asks for no candidates, one whose order may change does."""
    assert _ask(vector=ROW).depth == 0
    assert _ask(vector=ROW, include_scores=True, k=7).depth == 7
    assert _ask(vector=ROW, mmr={"lambda": 0.25}).mmr == Diversity(0.25, 50)
    assert _ask(vector=ROW, mmr={"candidates": 20}, k=30).depth == 30


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"vector": ROW, "mode": "text"}, "vector"),
        ({"text": "a", "vector": ROW, "mode": "text"}, "vector"),
        ({"vectors": [ROW], "mode": "hybrid"}, "text"),
        ({"text": "a", "vectors": [ROW], "mode": "hybrid"}, None),
        ({"texts": ["a", "b"], "vectors": [ROW], "mode": "hybrid"}, "vectors"),
        ({"text": "a", "vector": ROW, "mode": "vector"}, None),
        ({"text": "a", "texts": ["b"], "mode": "text"}, None),
        ({"mode": "hybrid"}, "text"),
        ({"text": " ", "mode": "text"}, "texts"),
        ({"text": "a", "mode": "words"}, "mode"),
        ({"vector": ROW, "mmr": {"lambda": 1.5}}, "mmr.lambda"),
        ({"vector": ROW, "mmr": {"candidates": 1000}}, "mmr.candidates"),
        ({"vector": ROW, "mmr": {"weight": 1}}, "mmr"),
        ({"vectors": [ROW] * 100, "mmr": {"candidates": 200}, "k": 100}, "mmr"),
        ({"text": "a"}, "text"),
        ({"text": "a", "mode": "hybrid"}, "text"),
        ({"text": "a", "mode": "text", "time_budget_ms": 5}, "time_budget_ms"),
        ({"vector": ROW, "mmr": {}, "time_budget_ms": 5}, "time_budget_ms"),
    ],
)
def test_what_a_mode_does_not_take_is_refused(body: dict[str, Any], param: str | None) -> None:
    """The error is a 400 that names the field."""
    with pytest.raises(InvalidRequest) as refused:
        _ask(**body)
    assert refused.value.http_status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(("shards", "most"), [(1, 4), (1, 256), (3, 4), (3, 256)])
@pytest.mark.parametrize("mode", ["text", "hybrid"])
def test_jobs_hold_texts_with_their_vectors(mode: str, shards: int, most: int) -> None:
    """Cut into jobs, each query keeps its text and its vector; candidates of several shards fit a message."""
    record = CollectionRecord(
        id="c", tenant="t", name="n", dimension=3, metric="cosine", shards=shards
    )
    words = [f"w{i}" for i in range(100)]
    rows = {} if mode == "text" else {"vectors": [[float(i + 1), 0.0, 0.0] for i in range(100)]}
    ask = _ask(texts=words, mode=mode, include_scores=True, k=50, **rows)
    works = [
        msgspec.msgpack.decode(parcel.payload, type=SearchWork)
        for parcel in search_parcels(
            record, ask, ask.vectors, ShardLayout.of(record, None), 0, most
        )
    ]
    assert [text for work in works for text in work.texts] == words
    assert b"".join(work.vectors for work in works) == ask.vectors
    assert all(work.whole(3) and work.alone == (shards == 1) for work in works)
    assert max(len(work.texts) for work in works) <= most
    if shards > 1:
        assert max(len(work.texts) * 2 * work.depth for work in works) <= 4000


def test_passages_of_several_queries_take_turns() -> None:
    """Orders that scores do not compare are joined by rank, a passage of both first."""
    one = [Hit("a", 0.03), Hit("b", 0.02), Hit("c", 0.01)]
    two = [Hit("d", 9.0), Hit("b", 8.0)]
    assert [hit.id for hit in interleaved([one, two], 3)] == ["b", "a", "d"]
    assert interleaved([one], 2) == one[:2]
