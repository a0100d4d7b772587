"""What is told of a search over several shards, and what older plans mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.registry.layout import ShardLayout
from common.wire.registry import CollectionRecord
from common.wire.search import SearchReport, SearchResult
from common.wire.workflows import SearchRequest
from services.router.workflows.search import merged, search_work

_PLAN: dict[str, Any] = {
    "many": False,
    "count": 1,
    "tokens": [],
    "vectors": b"\0\0\0\0",
    "k": 5,
    "filter": None,
    "min_score": None,
    "include_text": True,
    "include_metadata": True,
    "after": None,
}


def result(report: SearchReport | None) -> SearchResult:
    return SearchResult(shown=[[b"{}"]], scores=[[1.0]], applied="1-0", path="graph", report=report)


def told(*reports: SearchReport | None) -> SearchReport | None:
    return merged([[result(report)] for report in reports], 5).report


def test_shards_side_by_side_are_told_as_one() -> None:
    """The slowest shard's time, the least effort, the longest prediction; all must have fitted."""
    first = SearchReport("graph", 96, 3.0, budget_ms=5.0, predicted_ms=2.0, fits=True)
    second = SearchReport("graph", 64, 2.0, budget_ms=5.0, predicted_ms=4.0, fits=True)
    exact = SearchReport("exact", "exact", 1.0, budget_ms=5.0, predicted_ms=9.0, fits=False)

    assert told(first) == first
    assert told(first, second) == SearchReport("graph", 64, 3.0, 5.0, 4.0, fits=True)
    assert told(exact, first) == SearchReport("graph", 96, 3.0, 5.0, 9.0, fits=False)
    assert told(exact, exact) == exact


def test_what_a_shard_does_not_tell_is_not_told() -> None:
    """An older shard sends no report, a shard that has measured nothing no prediction."""
    known = SearchReport("graph", 96, 3.0, budget_ms=5.0, predicted_ms=2.0, fits=True)
    blind = SearchReport("graph", 10, 1.0, budget_ms=5.0, fits=False)

    assert told(known, None) is None
    assert told(known, blind) == SearchReport("graph", 10, 3.0, 5.0, None, fits=False)
    assert told(SearchReport("graph", 32, 2.0), SearchReport("graph", 24, 1.0)) == (
        SearchReport("graph", 24, 2.0)
    )


@pytest.mark.parametrize(
    ("older", "effort"),
    [
        ({"ef": None, "exact": False}, None),
        ({"ef": 40, "exact": False}, 40),
        ({"ef": 40, "exact": True}, "exact"),
        ({"effort": 40}, 40),
        ({"effort": "exact"}, "exact"),
    ],
)
def test_a_plan_of_an_older_router_has_an_effort(older: dict[str, Any], effort: Any) -> None:
    """Plans are kept while routers are replaced: `ef` and `exact` mean what they meant."""
    ask = msgspec.msgpack.decode(msgspec.msgpack.encode(_PLAN | older), type=SearchRequest)
    record = CollectionRecord(id="c", tenant="t", name="c", dimension=1, metric="dot")
    work = search_work(record, ask, ask.vectors, [], ShardLayout.of(record, None), 0)

    assert (work.effort, work.ef, work.exact) == (effort, None, False)
