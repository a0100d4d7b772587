"""ef as the graph grows: chosen by what the graph holds, by queries it has not seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index import exact, search_path
from services.vector_search.index.index import Index
from services.vector_search.index.rows import Floats

NONE = np.zeros(0, np.int64)


def _recall(index: Index, stored: Floats, queries: Floats) -> float:
    truth, _ = exact.top_k(queries, stored, 10, "dot")
    found = np.array(index.search(queries, 10, remember=False).labels)
    return float((truth[:, :, None] == found[:, None, :]).any(axis=2).mean())


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
        while index.maintain():
            pass
        assert index.newer == 0
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
