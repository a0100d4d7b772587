from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.wire.search import Chunk, Document, DocumentsWork
from tests.support.vectors import DIMENSION, ask, document, nearness, settle, shard, write


def _ids(result: Any) -> list[str]:
    return [hit.id for hit in result.hits[0]]


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_scores_are_the_metric(tmp_path: Path, metric: str) -> None:
    """Hits come best first with the cosine, the dot product, or the negative Euclidean distance."""
    rng = np.random.default_rng(1)
    x, q = rng.standard_normal((50, DIMENSION)), rng.standard_normal(DIMENSION)
    one = shard(tmp_path, metric)
    one.apply("1-0", write(0, [document(str(i), v) for i, v in enumerate(x)]))
    one.sync()
    result = one.search(ask(q, 5))
    expected = nearness(q, x, metric)
    best = np.argsort(-expected)[:5]
    assert _ids(result) == [str(i) for i in best]
    assert [hit.score for hit in result.hits[0]] == pytest.approx(expected[best].tolist(), abs=1e-4)
    assert (result.path, result.applied) == ("exact", "1-0")
    one.close()


def test_hits_say_where_the_passage_stands(tmp_path: Path) -> None:
    """A hit is a chunk: its document, offsets in characters, that slice of the text, and the metadata."""
    text = "Grüße ☃ aus Köln, und \x00 mehr"
    chunks = [
        Chunk(start=0, end=7, vector=np.eye(DIMENSION, dtype="<f4")[0].tobytes()),
        Chunk(start=5, end=len(text), vector=np.eye(DIMENSION, dtype="<f4")[1].tobytes()),
    ]
    one = shard(tmp_path)
    source = Document(id="a/b", hash="h", chunks=chunks, text=text, metadata={"n": {"x": [1, 2]}})
    one.apply("1-0", write(0, [source]))
    one.sync()
    hit = one.search(ask(np.eye(DIMENSION)[1], 1)).hits[0][0]
    assert (hit.id, hit.chunk, hit.start, hit.end) == ("a/b", 1, 5, len(text))
    assert (hit.text, hit.metadata) == (text[5:], {"n": {"x": [1, 2]}})
    bare = one.search(ask(np.eye(DIMENSION)[1], 1, with_text=False, with_metadata=False)).hits[0][0]
    assert (bare.text, bare.metadata) == (None, None)
    one.close()


def test_an_only_shard_joins_its_hits(tmp_path: Path) -> None:
    """A query's hits are one piece where nobody merges them, and say what they say one by one."""
    rng = np.random.default_rng(2)
    x, q = rng.standard_normal((40, DIMENSION)), rng.standard_normal((3, DIMENSION))
    one = shard(tmp_path, "dot")
    one.apply("1-0", write(0, [document(f'"{i},é', v) for i, v in enumerate(x)]))
    one.sync()
    best = np.sort(q @ x.T)[:, -7:]
    for least in (None, float(np.median(best)), 1e9):
        joined = one.search(ask(q, 7, min_score=least))
        apart = one.search(ask(q, 7, min_score=least, alone=False))
        assert joined.hits == apart.hits
        assert [[hit.score for hit in row] for row in apart.hits] == apart.scores == joined.scores
        assert [len(row) for row in joined.shown] == [min(1, len(row)) for row in apart.shown]
    one.close()


def test_an_upsert_replaces_all_chunks_and_k_is_clamped(tmp_path: Path) -> None:
    """After an upsert only the new chunks are found; k beyond what exists returns what exists."""
    one = shard(tmp_path)
    one.apply(
        "1-0", write(0, [document("a", np.eye(DIMENSION)[:5]), document("b", np.eye(DIMENSION)[6])])
    )
    one.apply("2-0", write(1, [document("a", np.eye(DIMENSION)[7])]))
    one.sync()
    assert sorted(_ids(one.search(ask(np.ones(DIMENSION), 100)))) == ["a", "b"]
    one.apply("3-0", write(2, deletes=["a", "nothing"]))
    one.sync()
    assert _ids(one.search(ask(np.ones(DIMENSION), 100))) == ["b"]
    one.apply("4-0", write(3, deletes=["b"]))
    one.sync()
    assert one.search(ask(np.ones(DIMENSION), 3)).hits == [[]]
    assert one.stats()["documents"] == 0
    one.close()


def test_writes_are_applied_once_and_in_order(tmp_path: Path) -> None:
    """Ids compare as numbers; an old id or a (request, index) seen before changes nothing."""
    one = shard(tmp_path)
    first = write(0, [document("a", np.eye(DIMENSION)[0])])
    assert one.apply("9-0", first) == "applied"
    assert one.apply("9-0", first) == "old"
    assert one.apply("10-0", first) == "repeated"
    one.sync()
    assert one.applied == "10-0"
    assert one.apply("9-5", write(1, deletes=["a"])) == "old"
    later = 10 + 24 * 3600 * 1000
    assert one.apply(f"{later}-0", write(0, deletes=["a"])) == "applied"
    one.sync()
    assert one.stats()["documents"] == 0
    one.close()


@pytest.mark.parametrize(
    "bad",
    [
        document("x", [float("nan")] * DIMENSION),
        document("x", [float("inf")] * DIMENSION),
        document("x", [1.0] * (DIMENSION + 1)),
        Document(id="x", hash="h", chunks=[Chunk(start=0, end=9, vector=b"\0" * 64)], text="short"),
        Document(id="x", hash="h", chunks=[Chunk(start=-1, end=0, vector=b"\0" * 64)], text="s"),
        document("x", [1.0] * DIMENSION, None, big=1 << 70),
    ],
)
def test_a_write_that_does_not_fit_changes_nothing(tmp_path: Path, bad: Document) -> None:
    """NaN, infinity, a wrong dimension, wrong offsets or impossible metadata: refused whole, the rest goes on."""
    one = shard(tmp_path)
    assert one.apply("1-0", write(0, [document("a", np.ones(DIMENSION)), bad])) == "refused"
    assert one.apply("2-0", write(1, [document("b", np.ones(DIMENSION))])) == "applied"
    one.sync()
    assert (_ids(one.search(ask(np.ones(DIMENSION)))), one.applied) == (["b"], "2-0")
    one.close()


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (ask([1.0] * (DIMENSION + 1)), "dimension_mismatch"),
        (ask([]), "dimension_mismatch"),
        (ask([float("nan")] * DIMENSION), "invalid_vector"),
        (ask([1.0] * DIMENSION, k=0), "invalid_request"),
        (ask([1.0] * DIMENSION, ef=0), "invalid_request"),
        (ask([1.0] * DIMENSION, filter={"$where": 1}), "invalid_filter"),
    ],
)
def test_bad_queries_are_refused(tmp_path: Path, work: Any, code: str) -> None:
    """A query that cannot be understood gets an error with its code."""
    one = shard(tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        one.search(work)
    assert caught.value.code == code
    one.close()


def test_documents_are_read_by_id_and_in_pages(tmp_path: Path) -> None:
    """`get` keeps the order asked and leaves out what is missing; pages go by id and end with no cursor."""
    one = shard(tmp_path)
    vectors = np.random.default_rng(2).standard_normal((7, DIMENSION)).astype("<f4")
    docs = [document(f"d{i}", v, "text", odd=i % 2) for i, v in enumerate(vectors)]
    one.apply("1-0", write(0, docs))
    one.sync()
    got = one.documents(
        DocumentsWork(collection="c1", op="get", ids=["d3", "no", "d1"], with_vectors=True)
    ).documents
    assert [d.id for d in got] == ["d3", "d1"]
    assert got[0].vectors == vectors[3].tobytes()
    assert (got[0].hash, got[0].text, got[0].metadata) == ("h-d3", "text", {"odd": 1})
    seen, cursor = [], None
    while True:
        page = one.documents(
            DocumentsWork(
                collection="c1",
                op="list",
                limit=2,
                cursor=cursor,
                filter={"odd": 0},
                with_text=False,
            )
        )
        seen += [d.id for d in page.documents]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == ["d0", "d2", "d4", "d6"]
    stats = one.documents(DocumentsWork(collection="c1", op="stats")).stats
    assert stats is not None
    assert (stats["documents"], stats["chunks"], stats["applied"]) == (7, 7, "1-0")
    one.close()


def test_a_graph_is_built_extended_compacted_and_found_again(tmp_path: Path) -> None:
    """Above `exact_below` a graph answers at recall >= 0.95; deletes, more writes and a restart keep it so."""
    rng = np.random.default_rng(3)
    latent = rng.standard_normal((8, DIMENSION))
    x = rng.standard_normal((3000, 8)) @ latent
    q = rng.standard_normal((50, 8)) @ latent
    one = shard(tmp_path, exact_below=500, snapshot_bytes=1)
    one.apply("1-0", write(0, [document(str(i), v) for i, v in enumerate(x[:2000])]))
    one.sync()
    settle(one)
    one.apply("2-0", write(1, deletes=[str(i) for i in range(1200)]))
    one.apply("3-0", write(2, [document(str(i), x[i]) for i in range(2000, 3000)]))
    one.sync()

    def recall(path: str) -> float:
        result = one.search(ask(q, 10))
        assert result.path == path
        near = 0
        for query, hits in zip(q, result.hits, strict=True):
            scores = nearness(query, x, "cosine")
            scores[:1200] = -9
            near += len({h.id for h in hits} & {str(i) for i in np.argsort(-scores)[:10]})
        return near / 500

    assert recall("graph") >= 0.95  # deleted rows still in the graph, new ones not yet
    settle(one)
    assert one.stats()["deleted_ratio"] == 0.0
    assert recall("graph") >= 0.95
    assert one.audit() >= 0.95
    assert (one.snapshot(), one.keep_graph()) == ("3-0", True)
    one.close()
    one = shard(tmp_path, exact_below=500)
    assert recall("graph") >= 0.95
    assert one.stats()["log_bytes"] == 0
    one.apply("4-0", write(3, deletes=["2999"]))
    one.sync()
    one.close()
    one = shard(tmp_path, exact_below=500)
    assert one.search(ask(x[2999], 1)).hits[0][0].id != "2999"
    one.close()


def test_writes_that_never_pause_take_no_hit_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is deleted between a search and the look-up of its hits, as many come back as are wanted."""
    one = shard(tmp_path)
    rows = [document(str(i), np.full(DIMENSION, 10.0 - i) + np.eye(DIMENSION)[i]) for i in range(9)]
    one.apply("1-0", write(0, rows))
    one.sync()
    look_up, deleted = one._hits.of, list[str]()

    def late(labels: Any, scores: Any, work: Any) -> Any:
        """Delete the last hit that was found, unless writes are held back."""
        if not one._publishing.locked():
            number = len(deleted) + 2
            deleted.append(str(int(labels[0][-1]) - 1))
            one.apply(f"{number}-0", write(number, deletes=[deleted[-1]]))
            one.sync()
        return look_up(labels, scores, work)

    monkeypatch.setattr(one._hits, "of", late)
    hits = _ids(one.search(ask(np.ones(DIMENSION), 3)))

    assert len(deleted) == 4
    assert len(hits) == 3
    assert not set(hits) & set(deleted)
    one.close()


def test_stats_tell_of_searches_and_audits(tmp_path: Path) -> None:
    """Queries by the path they took, when the recall was last measured, and on how many queries; nothing before."""
    one = shard(tmp_path, exact_below=100)
    rng = np.random.default_rng(3)
    documents = [
        document(str(i), v, n=i) for i, v in enumerate(rng.standard_normal((300, DIMENSION)))
    ]
    one.apply("1-0", write(0, documents))
    one.sync()
    settle(one)
    before = one.stats()
    assert (before["searches"], before["audited_at"], before["compared"]) == ({}, None, 0)

    one.audit()  # there is nothing yet to compare
    assert one.stats()["audited_at"] is None
    queries = rng.standard_normal((6, DIMENSION))
    one.search(ask(queries))
    one.search(ask(queries[:1]))
    one.search(ask(queries[:2], exact=True))
    one.search(ask(queries[:1], filter={"n": {"$lt": 3}}))
    one.audit()
    after = one.stats()
    assert after["searches"] == {"graph": 7, "exact": 2, "filtered-exact": 1}
    assert after["compared"] == 2
    assert after["audited_at"] > 0
    one.close()
