"""The children of a shard: together they hold what their parent holds, and go on doing so with every write."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.config import SearchConfig
from common.registry.layout import SPACE, hash_of_document
from common.wire.search import DocumentsWork, Write
from services.vector_search.applier import apply_batch, within
from services.vector_search.shard import DATABASE, Shard
from services.vector_search.shard_splitter import make_child
from services.vector_search.text_index import PIECE
from tests.support.vectors import DIMENSION, ask, config, document, record, settle, shard, write

names = st.sampled_from([f"d{i}" for i in range(16)])
writes = st.lists(
    st.tuples(st.lists(names, max_size=4, unique=True), st.lists(names, max_size=3, unique=True)),
    max_size=8,
)


def _entries(made: Any, first: int) -> list[tuple[str, Write]]:
    rows = np.random.default_rng(3)
    return [
        (
            f"{number}-0",
            write(
                number,
                [
                    document(name, rows.standard_normal(DIMENSION), "text", number=number)
                    for name in upserts
                ],
                deletes,
            ),
        )
        for number, (upserts, deletes) in enumerate(made, first)
    ]


def _held(one: Shard) -> dict[str, Any]:
    work = DocumentsWork(collection="c1", op="list", limit=1000, with_vectors=True)
    return {doc.id: (doc.metadata, doc.vectors) for doc in one.documents(work).documents}


@given(writes, writes, st.integers(1, SPACE - 1))
def test_children_hold_what_their_parent_holds(before: Any, after: Any, at: int) -> None:
    """Split anywhere, between any writes: no document is lost, doubled or changed, and searches find the same."""
    root = Path(tempfile.mkdtemp())
    parent = shard(root)
    apply_batch(parent, list(_entries(before, 1)))
    children = []
    for number, (low, high) in enumerate(((0, at), (at, SPACE)), 1):
        path = root / str(number)
        path.mkdir()
        make_child(parent.directory / DATABASE, path / DATABASE, low, high)
        children.append((Shard(path, record(), SearchConfig()), low, high))
    entries = _entries(after, len(before) + 1)
    apply_batch(parent, list(entries))
    expected = _held(parent)
    for one, low, high in children:
        # What the parent had applied is known to the child: applied again it changes nothing.
        again = [
            (entry, within(made, low, high)) for entry, made in [*_entries(before, 1), *entries]
        ]
        apply_batch(one, again)
        assert _held(one) == {
            name: value for name, value in expected.items() if low <= hash_of_document(name) < high
        }
        assert one.applied == parent.applied
    queries = np.eye(DIMENSION)[:3]
    whole = parent.search(ask(queries, 16)).hits
    parts = [one.search(ask(queries, 16)).hits for one, _, _ in children]
    for row, *of_children in zip(whole, *parts, strict=True):
        merged = sorted((hit.score, hit.id) for part in of_children for hit in part)
        assert merged == sorted((hit.score, hit.id) for hit in row)
    for one in (parent, *(child for child, _, _ in children)):
        one.close()


def test_children_are_settled_once_they_find_the_words_of_their_parent(tmp_path: Path) -> None:
    """A child is not settled before it has indexed the texts of its parent; then both find what the parent finds."""
    parent = shard(tmp_path)
    words = ["kiwi oak", "kiwi", "oak fern", "fern sun", "mist", "loam", "zinc", "reed"]
    documents = [
        document(f"d{i}", np.ones(DIMENSION), f"{words[i % 8]} only{i}") for i in range(3 * PIECE)
    ]
    parent.apply("1-0", write(1, documents))
    parent.sync()
    queries = ["kiwi", "fern oak", "only7", "only1100"]
    found: dict[str, set[str]] = {query: set() for query in queries}
    for number, (low, high) in enumerate(((0, SPACE // 2), (SPACE // 2, SPACE)), 1):
        path = tmp_path / str(number)
        path.mkdir()
        make_child(parent.directory / DATABASE, path / DATABASE, low, high)
        child = Shard(path, record(), SearchConfig())
        assert child.maintain()
        assert not child.settled
        child.close()
        child = Shard(path, record(), SearchConfig())  # as after a kill
        assert not child.settled
        settle(child)
        assert child.settled
        for query in queries:
            found[query] |= _by_words(child, query)
        child.close()

    assert found == {query: _by_words(parent, query) for query in queries}
    assert all(found.values())
    parent.close()


def test_a_child_is_settled_once_it_has_its_graph(tmp_path: Path) -> None:
    """A child with as many rows as want a graph is not settled before that is built."""
    parent = shard(tmp_path, exact_below=100)
    rows = np.random.default_rng(5).standard_normal((300, DIMENSION))
    parent.apply("1-0", write(1, [document(f"d{i}", row) for i, row in enumerate(rows)]))
    parent.sync()
    (tmp_path / "1").mkdir()
    make_child(parent.directory / DATABASE, tmp_path / "1" / DATABASE, 0, SPACE)
    child = Shard(tmp_path / "1", record(), config(exact_below=100))
    while child.stats()["text_indexed"] < 1.0:
        assert not child.settled
        child.maintain()
    settle(child)
    assert (child.settled, child.stats()["index"]) == (True, "graph")
    child.close()
    parent.close()


def _by_words(one: Shard, query: str) -> set[str]:
    result = one.search(ask([], 3 * PIECE, mode="text", texts=[query]))
    assert result.text_indexed == 1.0
    return {hit.id for hit in result.hits[0]}


def test_a_write_that_the_parent_applied_is_known_to_its_children(tmp_path: Path) -> None:
    """A write that is repeated under a new id, as after a lost reply, changes a child no more than its parent."""
    parent = shard(tmp_path)
    parent.apply("1-0", write(1, [document("a", np.ones(DIMENSION))]))
    parent.apply("2-0", write(2, deletes=["a"]))
    parent.sync()
    (tmp_path / "1").mkdir()
    make_child(parent.directory / DATABASE, tmp_path / "1" / DATABASE, 0, SPACE)
    child = Shard(tmp_path / "1", record(), SearchConfig())
    assert child.apply("3-0", write(1, [document("a", np.ones(DIMENSION))])) == "repeated"
    child.sync()
    assert _held(child) == {}
    child.close()
    parent.close()
