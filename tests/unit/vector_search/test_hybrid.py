"""Searches by vector, by text and by both, of one shard and of several, against their definitions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common import ranking
from common.errors import InvalidRequest
from common.wire.search import Diversity, HitScores, SearchResult, scored
from common.wire.workflows import SearchRequest
from services.router.workflows import candidates
from services.vector_search.query_batch import _together, alike
from services.vector_search.shard import Shard
from tests.support.vectors import DIMENSION, ask, document, nearness, shard, write

WORDS = ["kiwi", "oak", "sun", "zinc", "x9", "fern"]
METRICS = ("cosine", "dot", "l2")


class Corpus:
    """Documents of one chunk, spread over shards; `n` is a number to filter by."""

    def __init__(self, root: Path, seed: int, metric: str, shards: int, count: int = 40) -> None:
        rng = np.random.default_rng(seed)
        self.metric = metric
        self.vectors = rng.standard_normal((count, DIMENSION)).astype("<f4")
        self.texts = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(count)]
        self.shards = [shard(root / str(number), metric) for number in range(shards)]
        for number, one in enumerate(self.shards):
            mine = range(number, count, shards)
            documents = [document(f"d{i}", self.vectors[i], self.texts[i], n=i % 4) for i in mine]
            one.apply("1-0", write(0, documents))
            one.sync()

    def search(self, request: SearchRequest) -> SearchResult:
        """What the router makes of the shards' answers."""
        works = ask(np.zeros((0, DIMENSION)), request.k).__class__
        found = [
            one.search(
                works(
                    collection="c1",
                    vectors=request.vectors,
                    k=request.k,
                    filter=request.filter,
                    min_score=request.min_score,
                    mode=request.mode,
                    texts=request.texts,
                    depth=request.depth,
                    mmr=request.mmr,
                    with_scores=request.with_scores,
                    alone=len(self.shards) == 1,
                )
            )
            for one in self.shards
        ]
        if len(found) == 1:
            return found[0]
        return candidates.ranked([[result] for result in found], request, request.vectors)

    def bm25(self, text: str, wanted: set[int]) -> dict[int, float]:
        """Each shard's own scores, which a test of their own holds against the formula."""
        found: dict[int, float] = {}
        for one in self.shards:
            result = one.search(ask([], 1000, mode="text", texts=[text]))
            found |= {int(hit.id[1:]): hit.score for hit in result.hits[0]}
        return {key: score for key, score in found.items() if key in wanted}

    def close(self) -> None:
        for one in self.shards:
            one.close()


def request(**fields: Any) -> SearchRequest:
    base: dict[str, Any] = {
        "many": False, "count": 1, "tokens": [], "vectors": b"", "k": 5, "filter": None, "min_score": None,
        "include_text": True, "include_metadata": True, "ef": None, "exact": False, "after": None,
    }  # fmt: skip
    return SearchRequest(**(base | fields))


@given(
    seed=st.integers(0, 1000),
    metric=st.sampled_from(METRICS),
    shards=st.sampled_from([1, 3]),
    k=st.integers(1, 12),
    depth=st.sampled_from([12, 20, 200]),
    below=st.none() | st.integers(0, 3),
    text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join),
)
def test_fusion_equals_the_definition(
    seed: int, metric: str, shards: int, k: int, depth: int, below: int | None, text: str
) -> None:
    """The hits of one shard and of three are those of reciprocal rank fusion over both whole orders."""
    with tempfile.TemporaryDirectory() as root:
        corpus = Corpus(Path(root), seed, metric, shards)
        query = np.random.default_rng(seed + 1).standard_normal(DIMENSION).astype("<f4")
        wanted = {i for i in range(len(corpus.texts)) if below is None or i % 4 < below}
        near = nearness(query, corpus.vectors, metric)
        texts = corpus.bm25(text, wanted)
        # Of equal scores at the depth any may be left out.
        ordered = sorted(texts.values(), reverse=True)
        assume(len(ordered) <= depth or ordered[depth - 1] > ordered[depth])
        columns = [
            [float(near[i]) if i in wanted else None for i in range(len(near))],
            [texts.get(i) for i in range(len(near))],
        ]
        expected = {one.place: one.score for one in ranking.fused(columns, depth)}
        found = corpus.search(
            request(
                vectors=query.tobytes(),
                texts=[text],
                mode="hybrid",
                k=k,
                depth=depth,
                filter=None if below is None else {"n": {"$lt": below}},
                with_scores=True,
            )
        )
        hits = found.hits[0]
        assert len(hits) == min(k, len(expected))
        best = sorted(expected.values(), reverse=True)[:k]
        # Equal BM25 scores may take their ranks in another order, which moves a reciprocal by little.
        assert [hit.score for hit in hits] == pytest.approx(best, abs=2e-3)
        for hit in hits:
            number = int(hit.id[1:])
            assert number in wanted
            assert hit.scores is not None
            assert hit.scores.vector == pytest.approx(near[number], abs=1e-4)
            if hit.scores.text is None:  # not found, or not among the best
                assert number not in texts or len(texts) > depth
            else:
                assert hit.scores.text == pytest.approx(texts[number])
        corpus.close()


@given(
    seed=st.integers(0, 1000),
    metric=st.sampled_from(METRICS),
    weight=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    k=st.integers(1, 12),
    count=st.sampled_from([4, 10, 40]),
)
def test_one_shard_and_three_diversify_alike(
    seed: int, metric: str, weight: float, k: int, count: int
) -> None:
    """Maximal marginal relevance by numpy on a shard and in plain Python choose what the definition does."""
    with tempfile.TemporaryDirectory() as root:
        query = np.random.default_rng(seed + 1).standard_normal(DIMENSION).astype("<f4")
        wish = request(
            vectors=query.tobytes(), k=k, depth=max(k, count), mmr=Diversity(weight, count)
        )
        one, three = (Corpus(Path(root) / str(shards), seed, metric, shards) for shards in (1, 3))
        alone = [hit.id for hit in one.search(wish).hits[0]]
        assert [hit.id for hit in three.search(wish).hits[0]] == alone
        order = np.argsort(-nearness(query, one.vectors, metric), kind="stable")
        rows = one.vectors[order[:count]].astype(np.float64)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        near = (rows @ query / np.linalg.norm(query)).tolist()
        chosen = ranking.diversified(near, lambda at: (rows @ rows[at]).tolist(), weight, k)
        expected = [order[at] for at in chosen] + list(order[count:])
        assert alone == [f"d{i}" for i in expected[:k]]
        one.close()
        three.close()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("mode", ["text", "hybrid"])
def test_other_modes_diversify_too(tmp_path: Path, mode: Any, shards: int) -> None:
    """By text and by both as many different hits come as without diversity, the most relevant one first."""
    corpus = Corpus(tmp_path, 5, "cosine", shards)
    vectors = b"" if mode == "text" else corpus.vectors[3].tobytes()
    plain = request(vectors=vectors, texts=["kiwi zinc"], mode=mode, k=8, depth=50)
    diverse = msgspec.structs.replace(plain, mmr=Diversity(0.2, 30))
    before, after = corpus.search(plain).hits[0], corpus.search(diverse).hits[0]
    assert (len(before), before[0].id) == (8, after[0].id)
    assert len({hit.id for hit in after}) == 8
    assert [hit.id for hit in before] != [hit.id for hit in after]
    corpus.close()


@pytest.mark.parametrize("shards", [1, 3])
def test_the_least_score_bounds_the_vectors(tmp_path: Path, shards: int) -> None:
    """In mode hybrid `min_score` is that of the vectors, also for what the text alone found."""
    corpus = Corpus(tmp_path, 6, "cosine", shards)
    near = nearness(corpus.vectors[0], corpus.vectors, "cosine")
    wish = request(
        vectors=corpus.vectors[0].tobytes(), texts=["kiwi"], mode="hybrid", k=40, depth=100, min_score=0.1
    )  # fmt: skip
    found = {int(hit.id[1:]) for hit in corpus.search(wish).hits[0]}
    assert found == {i for i, score in enumerate(near) if score >= 0.1}
    corpus.close()


def test_searches_that_join_get_what_is_theirs(tmp_path: Path) -> None:
    """Diversified searches that ask alike run as one and find what each finds alone; those of texts run alone."""
    corpus = Corpus(tmp_path, 7, "cosine", 1)
    one = corpus.shards[0]
    works = [
        ask(corpus.vectors[i : i + n], 4, mmr=Diversity(), depth=20, alone=False)
        for i, n in ((0, 1), (1, 3), (4, 1))
    ]
    assert len({alike(work) for work in works}) == 1
    assert alike(works[0]) != alike(ask(corpus.vectors[0], 4))
    together = _together(one, works, 0.0)
    assert together == [one.search(work) for work in works]
    assert alike(ask([], 4, mode="text", texts=["oak"])) is None
    assert alike(ask(corpus.vectors[0], 4, mode="hybrid", texts=["oak"], depth=50)) is None
    corpus.close()


@pytest.mark.parametrize(
    "work",
    [
        ask([], 5, mode="text"),
        ask([1.0] * DIMENSION, 5, mode="hybrid", depth=50),
        ask([1.0] * DIMENSION, 5, mode="hybrid", depth=50, texts=["a", "b"]),
        ask([1.0] * DIMENSION, 5, depth=4, mmr=Diversity()),
    ],
)
def test_bad_combinations_are_refused(tmp_path: Path, work: Any) -> None:
    """Texts and vectors come in equal numbers, and no fewer candidates than hits."""
    one: Shard = shard(tmp_path)
    with pytest.raises(InvalidRequest):
        one.search(work)
    one.close()


def test_an_id_never_stands_for_a_score() -> None:
    """An id that holds the mark of a missing score is left as it is."""
    name = '","score":null,"'
    hit = b'{"id":%b,"score":null,"chunk":0}' % msgspec.json.encode(name)
    shown = msgspec.json.decode(scored(hit, 0.5, HitScores(vector=1.0)))
    assert shown == {"id": name, "score": 0.5, "scores": {"vector": 1.0}, "chunk": 0}
