"""The path of a search, by counts: where a graph is walked with a filter, it is walked far enough."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index.search_path import (
    BEYOND,
    CANDIDATE_S,
    COMPARED_ROW_S,
    GATHERED_ROW_S,
    choose,
)


@given(st.data())
def test_a_filter_widens_the_beam_by_the_rows_among_which_its_results_are(
    data: st.DataObject,
) -> None:
    """Beyond the rows among which k match, ef more candidates are kept, as without a filter; else rows are compared."""
    live = data.draw(st.integers(1, 5_000_000))
    matching = data.draw(st.integers(0, live))
    k, ef = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 2048))
    queries = data.draw(st.integers(1, 300))

    way = choose(
        live=live, indexed=live, matching=matching, queries=queries, k=k, ef=ef, exact=False
    )

    row_s = COMPARED_ROW_S + (GATHERED_ROW_S - COMPARED_ROW_S) / queries
    depth, dearer = k * live / max(matching, 1), matching * row_s / CANDIDATE_S
    if way.way == "filtered-exact":
        assert matching <= k or max(depth + BEYOND * ef, 2 * depth + k) + 2 >= min(dearer, live) - 1
        return
    assert way.beam >= way.fetch >= k
    assert way.beam >= BEYOND * ef + math.floor(depth)
    assert way.beam < way.limit <= min(dearer + 1, live)


@given(st.integers(1, 5_000_000), st.data())
def test_many_queries_share_a_scan(live: int, data: st.DataObject) -> None:
    """What one query compares, a batch compares as well; and no graph is walked further for more queries."""
    matching, k = data.draw(st.integers(0, live)), data.draw(st.integers(1, 200))
    few, more = sorted(data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300))))
    one, many = (
        choose(live=live, indexed=live, matching=matching, queries=queries, k=k, ef=64, exact=False)
        for queries in (few, more)
    )
    if one.way == "filtered-exact":
        assert many.way == "filtered-exact"
    elif many.way == "filtered-graph":
        assert (many.fetch, many.beam) == (one.fetch, one.beam)
        assert many.limit <= one.limit


@given(st.integers(1, 1_000_000), st.integers(1, 500), st.integers(1, 2048))
def test_without_a_filter_the_beam_is_ef(live: int, k: int, ef: int) -> None:
    """A graph is asked for k with its own ef; without a graph, or exactly, every row is compared."""
    way = choose(live=live, indexed=live, matching=None, queries=1, k=k, ef=ef, exact=False)
    assert (way.way, way.fetch, way.beam) == ("graph", k, max(ef, k))
    for indexed, exact in ((0, False), (live, True)):
        found = choose(
            live=live, indexed=indexed, matching=None, queries=1, k=k, ef=ef, exact=exact
        )
        assert found.way == "exact"
