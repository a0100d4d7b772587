"""What every kind of index keeps to, whichever it is, and the change from one kind to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.wire.message import decode, encode
from common.wire.search import DocumentsWork, SearchReport, SearchResult, SearchWork
from services.vector_search.index import exact
from services.vector_search.index.index import Index
from services.vector_search.index.quantizer_training import train
from services.vector_search.query_batch import alike, execute, reported
from services.vector_search.shard_handle import ShardHandle
from tests.support.vectors import DIMENSION, ask, document, settle, shard, write

NONE = np.zeros(0, np.int64)
ROWS = 1500
ROOM = 300_000  # bytes that are too few for a graph over those rows, but not for their codes


def vectors(count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((count, 8)) @ rng.standard_normal((8, DIMENSION))
    return made.astype(np.float32)


def index(exact_below: int, rows: Any, **more: Any) -> Index:
    made = Index(DIMENSION, "dot", exact_below=exact_below, threads=2, trainer=train, **more)
    labels = np.arange(len(rows))
    made.publish(rows, labels, labels, NONE)
    while made.maintain():
        pass
    return made


@pytest.fixture(params=["exact", "graph", "ivfpq"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def made(kind: str) -> Index:
    """An index of each kind over the same rows."""
    room = {"room": lambda: ROOM} if kind == "ivfpq" else {}
    found = index(ROWS + 1 if kind == "exact" else 500, vectors(ROWS, 1), **room)
    assert (found.now.kind, found.now.stats().path) == (kind, kind)
    return found


def test_every_effort_returns_k_and_exact_finds_all(made: Index) -> None:
    """Each effort of the ladder is a plan and a search; "exact" is right whatever the kind."""
    rows, queries = vectors(ROWS, 1), vectors(20, 2)
    truth, _ = exact.top_k(queries, rows, 10, "dot")
    ladder, planned = made.now.ladder(), made.now.plans(len(queries), 10)

    assert [rung.effort for rung in ladder] == [plan.effort for plan in planned]
    for plan in planned:
        found = made.search(queries, 10, effort=plan.effort)
        assert (found.effort, found.path, found.plan) == (plan.effort, plan.path, plan)
        assert all(len(row) == 10 for row in found.labels)
    right = made.search(queries, 10, effort="exact")
    assert (right.effort, right.path) == ("exact", "exact")
    assert np.array_equal(np.array(right.labels), truth)


def test_more_effort_finds_no_less(made: Index) -> None:
    """The largest effort of the ladder finds at least what the least finds, and nearly everything."""
    rows, queries = vectors(ROWS, 1), vectors(50, 2)
    truth, _ = exact.top_k(queries, rows, 10, "dot")

    def recall(effort: Any) -> float:
        labels = made.search(queries, 10, effort=effort).labels
        return float(np.mean([len(set(a) & set(b)) for a, b in zip(labels, truth, strict=True)]))

    ladder = made.now.ladder()
    assert 9.9 <= recall(ladder[-1].effort) >= recall(ladder[0].effort)


@pytest.mark.parametrize("share", [0.5, 0.05, 0.002])
def test_a_filter_never_under_returns_at_any_effort(made: Index, share: float) -> None:
    """All that is found is allowed, and k are found whenever k match; the plans say the path that is gone."""
    wanted = np.random.default_rng(3).random(ROWS) < share
    queries, matching = vectors(5, 4), made.now.matching(wanted)
    assert matching == np.count_nonzero(wanted)

    for plan in made.now.plans(len(queries), 10, wanted):
        found = made.now.search(queries, 10, effort=plan.effort, wanted=wanted, remember=False)
        assert found.plan.path == plan.path
        for row in found.labels:
            assert len(row) == min(10, matching)
            assert wanted[row].all()


def test_pick_chooses_among_the_plans(made: Index) -> None:
    """A search goes by the plan that was picked."""
    seen = []

    def largest(plans: Any) -> Any:
        seen.append(plans)
        return plans[-1]

    found = made.now.search(vectors(3, 5), 10, pick=largest)
    assert seen == [made.now.plans(3, 10)]
    assert found.plan == seen[0][-1]


def test_a_shard_grows_into_a_graph_and_back() -> None:
    """The kind follows the rows, with some to spare, and no search in between misses a row."""
    rows, queries = vectors(ROWS, 1), vectors(20, 2)
    made = index(1000, rows[:999])
    assert made.now.kind == "exact"
    labels = np.arange(999, ROWS)
    made.publish(rows[999:], labels, labels, NONE)
    assert made.maintain()

    assert (made.now.kind, made.now.stats().path) == ("graph", "exact")  # not built yet
    truth, _ = exact.top_k(queries, rows, 10, "dot")
    assert np.array_equal(np.array(made.search(queries, 10).labels), truth)
    while made.maintain():
        pass
    assert (made.now.kind, made.now.stats().path) == ("graph", "graph")
    assert made.now.stats().bytes.keys() == {"rows", "graph"}
    snapshot = made.now.snapshot()
    assert snapshot is not None
    assert (snapshot.kind, len(snapshot.labels)) == ("graph", ROWS)

    made.publish(np.zeros((0, DIMENSION), np.float32), NONE, NONE, np.arange(700))
    while made.maintain():
        pass
    assert (made.now.kind, made.now.stats().live) == ("graph", 800)
    made.publish(np.zeros((0, DIMENSION), np.float32), NONE, NONE, np.arange(700, 701))
    while made.maintain():
        pass
    assert (made.now.kind, made.now.snapshot()) == ("exact", None)
    truth, _ = exact.top_k(queries, rows[701:], 10, "dot")
    assert np.array_equal(np.array(made.search(queries, 10).labels) - 701, truth)


def test_an_index_without_room_stays_exact() -> None:
    """Where the process has no memory for a graph nor for codes, every row is compared, and the reason is told."""
    made = index(500, vectors(ROWS, 1), room=lambda: 1000)

    assert made.now.kind == "exact"
    assert "and the process has 1,000 bytes for either" in made.choice().why


def test_a_closed_index_builds_no_more() -> None:
    """A change of kind that comes after the close begins nothing that lasts."""
    made = Index(DIMENSION, "dot", exact_below=500, threads=2)
    labels = np.arange(ROWS)
    made.publish(vectors(ROWS, 1), labels, labels, NONE)
    made.close()
    made.maintain()
    made.maintain()

    assert made.now.stats().path == "exact"


# -- a shard


def filled(tmp_path: Path, **fields: Any) -> Any:
    one = shard(tmp_path, **fields)
    rows = vectors(ROWS, 1)
    documents = [document(str(i), row, n=i) for i, row in enumerate(rows)]
    one.apply("1-0", write(0, documents))
    one.sync()
    settle(one)
    return one


def test_a_shard_reports_what_it_used(tmp_path: Path) -> None:
    """Kind, effort and time of every search; with a budget also that, what was predicted, and whether it fits."""
    one = filled(tmp_path, exact_below=500)
    query = vectors(1, 9)
    plain = one.search(ask(query)).report
    few = one.search(ask(query, effort=12)).report
    full = one.search(ask(query, effort="exact")).report
    wide = one.search(ask(query, budget_ms=60_000.0))
    late = one.search(ask(query, budget_ms=5.0), spent_s=1.0).report

    assert (plain.kind, plain.effort) == ("graph", one.stats()["effort"])
    assert (few.effort, full.effort) == (12, "exact")
    assert (plain.budget_ms, plain.predicted_ms, plain.fits) == (None, None, None)
    assert (wide.path, wide.report.effort, wide.report.fits) == ("graph", 2048, True)
    assert 0 < wide.report.predicted_ms < 60_000
    assert (late.effort, late.fits, late.budget_ms) == (10, False, 5.0)
    assert late.took_ms > 1000
    one.close()


def test_an_exact_shard_is_exact_within_any_budget(tmp_path: Path) -> None:
    """There is one effort: it is used, and whether it fits is said."""
    one = filled(tmp_path)
    query = vectors(1, 9)
    truth = one.search(ask(query)).hits
    wide = one.search(ask(query, budget_ms=60_000.0))
    none = one.search(ask(query, budget_ms=1e-6))

    assert [hit.id for hit in wide.hits[0]] == [hit.id for hit in none.hits[0]]
    assert [hit.id for hit in wide.hits[0]] == [hit.id for hit in truth[0]]
    assert [(r.report.effort, r.report.fits) for r in (wide, none)] == [
        ("exact", True),
        ("exact", False),
    ]
    one.close()


def test_older_messages_mean_an_effort(tmp_path: Path) -> None:
    """`ef` and `exact`, as older routers write them, are efforts; a result without a report is one, too."""
    one = filled(tmp_path, exact_below=500)
    query = vectors(1, 9)
    assert one.search(ask(query, ef=24)).report.effort == 24
    assert one.search(ask(query, ef=24, exact=True)).report.effort == "exact"
    with pytest.raises(InvalidRequest, match='effort is 0; expected 1 to 10000, or "exact"'):
        one.search(ask(query, ef=0))
    former = encode(one.search(ask(query))).replace(b"\xa6report", b"\xa6former")
    assert decode(former, SearchResult).report is None
    one.close()


def test_explain_tells_kind_efforts_and_a_filters_way(tmp_path: Path) -> None:
    """What is told agrees with what searches do."""
    one = filled(tmp_path, exact_below=500)
    for seed in range(300):
        one.search(ask(vectors(1, seed)))
    one.audit()

    def told(condition: Any = None) -> dict[str, Any]:
        work = DocumentsWork(collection="c1", op="explain", filter=condition)
        stats = one.documents(work).stats
        assert stats is not None
        return dict(stats)

    plain = told()
    assert (plain["kind"], plain["path"], plain["live"]) == ("graph", "graph", ROWS)
    assert plain["why"].startswith("1,500 live vectors of 16 dimensions, at least 500:")
    assert plain["effort"] == one.search(ask(vectors(1, 9))).report.effort
    recalls = [rung["recall"] for rung in plain["efforts"]]
    assert recalls == sorted(recalls)
    assert recalls[-1] > 0.99
    assert all(rung["predicted_ms"] >= 0 for rung in plain["efforts"])
    assert "filter" not in plain
    for condition, matching in (({"n": {"$lt": 750}}, 750), ({"n": 7}, 1), ({"n": -1}, 0)):
        way = told(condition)["filter"]
        found = one.search(ask(vectors(1, 9), filter=condition))
        assert (way["matching"], way["path"]) == (matching, found.path)
        assert way["selectivity"] == pytest.approx(matching / ROWS, abs=1e-6)
    one.close()


def test_an_index_in_the_making_explains_itself(tmp_path: Path) -> None:
    """Before the graph is there, a shard says that every row is compared until then."""
    one = shard(tmp_path, exact_below=500)
    one.apply("1-0", write(0, [document(str(i), row) for i, row in enumerate(vectors(600, 1))]))
    one.sync()
    one.maintain()
    stats = one.documents(DocumentsWork(collection="c1", op="explain", filter={"n": 1})).stats

    assert stats is not None
    assert (stats["kind"], stats["path"], stats["effort"]) == ("graph", "exact", "exact")
    assert stats["why"].endswith("; it is being built, and every row is compared until then")
    assert {rung["path"] for rung in stats["efforts"]} == {"filtered-exact"}
    one.close()


# -- batches


def test_searches_with_like_budgets_batch_and_the_strictest_decides(tmp_path: Path) -> None:
    """Budgets within a factor of two share a batch; those without one, or with a far one, do not join it."""
    work = ask(vectors(1, 1), budget_ms=5.0, spent_ms=1.0)
    assert alike(work) == alike(ask(vectors(1, 2), budget_ms=7.9))
    assert alike(work) != alike(ask(vectors(1, 2), budget_ms=8.1))
    assert alike(work) != alike(ask(vectors(1, 2)))
    assert alike(ask(vectors(1, 1), effort=16)) != alike(ask(vectors(1, 1), effort=24))

    one = filled(tmp_path, exact_below=500)
    handle = ShardHandle("c1", 0, one)
    works = [ask(vectors(1, seed), budget_ms=ms) for seed, ms in ((1, 900.0), (2, 600.0))]
    outcomes = execute(handle, works, spent_s=0.7)
    reports = [found.report for found in outcomes if isinstance(found, SearchResult)]
    assert [(r.budget_ms, r.fits) for r in reports if r] == [(900.0, True), (600.0, False)]
    assert {r.effort for r in reports if r} == {10}  # 600 ms have passed already
    one.close()


def test_a_report_of_a_batch_is_told_by_each_ones_budget() -> None:
    """Effort, time and prediction are the batch's; the budget and whether it was met are its own."""
    report = SearchReport("graph", 64, 3.0, budget_ms=4.0, predicted_ms=3.5, fits=True)
    work = SearchWork(collection="c", vectors=b"", k=1)

    assert reported(report, work) == report
    assert reported(None, work) is None
    for budget_ms, fits in ((6.0, True), (3.0, False)):
        told = reported(report, SearchWork(collection="c", vectors=b"", k=1, budget_ms=budget_ms))
        assert told == SearchReport("graph", 64, 3.0, budget_ms, 3.5, fits)
