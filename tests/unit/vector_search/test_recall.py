"""ef as the graph grows: chosen by what the graph holds, by queries it has not seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index import exact, search_path
from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.index import Index
from services.vector_search.index.rows import Flags, Floats

NONE = np.zeros(0, np.int64)


def _recall(index: Index, stored: Floats, queries: Floats, live: Flags | None = None) -> float:
    truth, _ = exact.top_k(queries, stored, 10, "dot", None if live is None else AllowedRows(live))
    found = np.array(index.search(queries, 10).labels)
    return float((truth[:, :, None] == found[:, None, :]).any(axis=2).mean())


def _settle(index: Index) -> None:
    while index.maintain():
        pass


def test_recall_stays_when_a_third_of_the_rows_is_replaced() -> None:
    """Deleted rows that are still walked over, and new ones, cost less than a hundredth; so does tidying up."""
    rng = np.random.default_rng(12)
    stored = rng.standard_normal((4000, 24)).astype(np.float32)
    queries = rng.standard_normal((500, 24)).astype(np.float32)
    index = Index(24, "dot", exact_below=500, threads=2)
    index.publish(stored, np.arange(4000), np.arange(4000), NONE)
    _settle(index)
    before = _recall(index, stored, queries)
    live = np.ones(4000, np.bool_)
    for _ in range(3):  # the first two stay below what is tidied up, the last does not
        gone = rng.choice(np.flatnonzero(live), 700, replace=False)
        fresh = rng.standard_normal((700, 24)).astype(np.float32)
        labels = np.arange(len(stored), len(stored) + 700)
        stored, live = np.vstack([stored, fresh]), np.append(live, np.ones(700, np.bool_))
        live[gone] = False
        index.publish(fresh, labels, labels, gone)
        _settle(index)
        assert _recall(index, stored, queries, live) >= before - 0.01
    assert index.rows.deleted_ratio == 0.0


def test_rows_hard_to_tell_apart_get_more_links() -> None:
    """A graph that needs to look at many candidates is built again with twice the links, one that does not is not."""
    rng = np.random.default_rng(13)
    hard = rng.standard_normal((3000, 80)).astype(np.float32)
    easy = (rng.standard_normal((3000, 4)) @ rng.standard_normal((4, 80))).astype(np.float32)
    links = []
    for stored in (hard, easy):
        index = Index(80, "l2", exact_below=500, threads=2)
        index.publish(stored, np.arange(3000), np.arange(3000), NONE)
        _settle(index)
        graph = index._state.view.graph
        assert graph is not None
        links.append(graph.links)
    assert links == [search_path.MANY_LINKS, search_path.FEW_LINKS]


def test_recall_as_served_holds_while_a_collection_doubles() -> None:
    """Of rows without any shape, the hardest, a graph that grows as fast as it may still finds 95 %."""
    rng = np.random.default_rng(11)
    stored = rng.standard_normal((6000, 32)).astype(np.float32)
    queries = rng.standard_normal((400, 32)).astype(np.float32)
    index = Index(32, "dot", exact_below=500, threads=2)
    done = 0
    for end in (750, 1500, 3000, 6000):
        labels = np.arange(done, end)
        index.publish(stored[done:end], labels, labels, NONE)
        _settle(index)
        assert index.now.stats().newer == 0
        assert _recall(index, stored[:end], queries) >= search_path.RECALL_GOAL
        done = end


@given(st.integers(1, 5000), st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 64))
def test_rows_enter_and_ef_is_chosen_in_time(built: int, writes: list[int], most: int) -> None:
    """Whatever is written, the graph outgrows its ef by little, and no more wait than are needed to choose it."""
    indexed, count, tuned_at = built, built, built
    for written in writes:
        count += written
        while behind := count - indexed:
            room = search_path.room(indexed=indexed, behind=behind, tuned_at=tuned_at)
            if room:
                indexed += min(room, most)
            elif behind >= search_path.LEAST_AUDITED and indexed > tuned_at:
                tuned_at = indexed
            else:
                break
        assert indexed <= max(1.1 * tuned_at, tuned_at + search_path.LEAST_AUDITED)
        assert count - indexed < search_path.LEAST_AUDITED
