"""The tuning of an index: what decides, by properties; and explorations of real indexes, whole and interrupted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.scale_out import network_s, over_machines
from common.clock import SYSTEM
from common.wire.tuning import ExploredSetting, IndexPlan, IndexSetting, TuningGoal
from services.vector_search.explanation import explain
from services.vector_search.index.followed_plan import FollowedPlan, divided, holds, tunes
from services.vector_search.index.index import Index
from services.vector_search.index.quantizer import USUAL
from services.vector_search.index.quantizer_training import train
from services.vector_search.index.rows import prepare
from services.vector_search.search_cost import SearchCost
from services.vector_search.tuning import choice, space
from services.vector_search.tuning.cost_lines import (
    STAGES,
    CostLines,
    ListsSearch,
    expected_codes,
    expected_slots,
)
from services.vector_search.tuning.exploration import ExplorationFiles, Known
from services.vector_search.tuning.plan_file import PlanFile
from services.vector_search.tuning.search_timer import SearchTimer, Side
from services.vector_search.tuning.shard_tuning import give_sample, measure
from tests.support.clock import ManualClock

NONE = np.zeros(0, np.int64)
ROWS, DIMENSION = 3000, 16

settings = st.builds(
    ExploredSetting,
    st.builds(IndexSetting, st.sampled_from(["exact", "graph", "ivfpq"]), effort=st.integers(0, 9)),
    recall=st.sampled_from([0.5, 0.8, 0.9, 1.0]),
    sure=st.sampled_from([0.4, 0.75, 0.85, 1.0]),
    qps=st.sampled_from([1.0, 10.0, 100.0]),
    p99_s=st.sampled_from([0.001, 0.01, 0.1]),
    bytes=st.sampled_from([10, 100, 1000]),
)
goals = st.builds(
    TuningGoal,
    st.sampled_from([0.5, 0.8, 1.0]),
    st.sampled_from([None, 0.005, 0.05]),
    st.sampled_from([None, 50, 500]),
)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_least_effort_is_found_with_few_tries(wanted: int, most: int) -> None:
    """Exponential search and bisection find the least that is enough, in about twice the logarithm of it."""
    tried: list[int] = []

    def enough(number: int) -> bool:
        tried.append(number)
        return number >= wanted

    assert space.least(enough, most) == (wanted if wanted <= most else None)
    assert len(tried) <= 2 * math.log2(most) + 4


@given(st.integers(1, 5_000_000), st.integers(1, 500_000))
def test_every_number_of_lists_has_enough_rows(rows: int, trained: int) -> None:
    """Numbers of lists are powers of two from 2^6 to n / 39, of the rows that they are trained from, each once."""
    found = space.numbers_of_lists(rows, trained)
    assert sorted(found) == [1 << e for e in range(6, 20) if (1 << e) <= min(rows, trained) // 39]


@given(st.integers(64, 5_000_000), st.integers(0, 15))
def test_other_codings_are_tried_with_the_best_number_of_lists_and_those_beside_it(
    rows: int, at: int
) -> None:
    """Three numbers at most, the best first; where none is the best, the one that is tried first of all."""
    counts = space.numbers_of_lists(rows, rows)
    assert space.beside(counts, None) == counts[:1]
    if counts:
        best = counts[at % len(counts)]
        found = space.beside(counts, best)
        assert found[0] == best
        assert set(found) == {each for each in counts if each in (best // 2, best, 2 * best)}


@given(st.lists(settings, min_size=1, max_size=30), goals)
def test_the_best_keeps_to_the_goal_and_nothing_beats_the_front(
    tried: list[ExploredSetting], goal: TuningGoal
) -> None:
    """The choice is what a look at every setting gives; every setting is beaten or equalled by one of the front."""
    judged = choice.judged(tried, goal)
    kept = [
        each
        for each in tried
        if each.sure >= goal.recall
        and (goal.p99_s is None or each.p99_s <= goal.p99_s)
        and (goal.memory_bytes is None or each.bytes <= goal.memory_bytes)
    ]
    best = choice.best(judged)
    assert (best is None) == (not kept)
    if best is not None:
        assert best.qps == max(each.qps for each in kept)
    else:
        assert "no setting finds" in choice.unreachable(judged, goal)
    front = choice.front(judged)
    assert all(any(choice._no_worse(one, each) for one in front) for each in judged)
    for one in front:
        assert not any(choice._no_worse(other, one) for other in front if other is not one)
    assert [each.recall for each in front] == sorted(each.recall for each in front)


@given(
    st.lists(st.floats(1e-10, 1e-6), min_size=len(STAGES), max_size=len(STAGES)), st.integers(0, 9)
)
def test_lines_find_the_costs_they_were_made_by(units: list[float], seed: int) -> None:
    """Seconds made by lines are predicted by the lines fitted to them, between the points too."""
    rng = np.random.default_rng(seed)

    def search() -> ListsSearch:
        dimension = int(rng.choice([32, 64, 128]))
        codes = float(rng.integers(1000, 100_000))
        bits = int(rng.choice([4, 8]))
        return ListsSearch(
            dimension, dimension, dimension // 4 if bits == 8 else dimension // 2, int(rng.choice([64, 512, 4096])),
            int(rng.integers(1, 64)), codes + 500.0, codes, int(rng.integers(10, 640)), bits, bool(rng.integers(2)),
        )  # fmt: skip

    made = CostLines(tuple(units))
    points = [search().work() for _ in range(80)]
    fitted = CostLines.fit([(work, made.seconds(work)) for work in points])
    assert min(fitted.units_s) >= 0
    for work in points + [search().work() for _ in range(20)]:
        assert fitted.seconds(work) == pytest.approx(made.seconds(work), rel=0.05)
        assert sum(fitted.stages_s(work)) == pytest.approx(fitted.seconds(work))
    assert len(points[0]) == len(STAGES)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=50), st.integers(1, 60))
def test_uneven_lists_are_expected_to_cost_more(sizes: list[int], probes: int) -> None:
    """The size-biased number of codes is at least that of even lists, at most all; places are no fewer than codes."""
    total, expected = sum(sizes), expected_codes(sizes, probes)
    assert expected <= total
    assert expected >= min(probes * total / len(sizes), total) * (1 - 1e-9)
    assert expected_slots(sizes, probes) >= expected * (1 - 1e-9)


def test_expected_codes_are_those_that_queries_like_the_rows_meet() -> None:
    """A query that falls into a list as a row does reads, on average, what the formula says."""
    sizes = np.array([10, 20, 70, 400])
    met = np.repeat(sizes, sizes)
    assert expected_codes(sizes.tolist(), 1) == pytest.approx(met.mean())


def test_rows_are_queries_of_tuning_or_of_the_proof() -> None:
    """About half of the labels are each; none is both; the same ones always."""
    labels = np.arange(10_000, dtype=np.int64)
    assert 0.4 < tunes(labels).mean() < 0.6
    held = divided(labels, np.arange(100))
    assert sorted([*held.tuning, *held.proof]) == list(range(100))
    assert tunes(labels[held.tuning]).all()
    assert not tunes(labels[held.proof]).any()


@given(st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=5), st.floats(0.2, 5.0))
def test_times_are_told_by_the_reference(costs_s: list[float], slower: float) -> None:
    """A machine that has become slower, or is disturbed in less than all rounds, tells the same times."""
    clock, pace, asked = ManualClock(), [1.0], [0]
    queries = np.zeros((8, 2), np.float32)

    def side(cost_s: float) -> Side:
        def search(_: Any) -> None:
            asked[0] += 1
            disturbed = 50.0 if asked[0] < len(costs_s) * 10 else 1.0  # within the first round
            clock.now_s += cost_s * pace[0] * disturbed

        return Side(search, queries)

    timer = SearchTimer(side(0.001), clock)
    sides = [side(cost_s) for cost_s in costs_s]
    for pace[0] in (1.0, slower):
        times = timer.time(sides)
        assert [each.mean_s for each in times] == pytest.approx(costs_s)
        assert [each.p99_s for each in times] == pytest.approx(costs_s)
    assert timer.base_s == pytest.approx(0.001)


# -- real indexes


def vectors(count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    wide = np.random.default_rng(0).standard_normal((8, DIMENSION))
    made = rng.standard_normal((count, 8)) @ wide + 0.05 * rng.standard_normal((count, DIMENSION))
    return prepare(made.astype(np.float32), "cosine")


def index_of(count: int) -> Index:
    made = Index(DIMENSION, "cosine", exact_below=10**6, threads=2, trainer=train)
    labels = np.arange(count)
    made.publish(vectors(count, 1), labels, labels, NONE)
    settle(made)
    return made


def settle(made: Index) -> None:
    while made.maintain():
        pass


def recall(made: Index) -> float:
    queries = vectors(100, 2)
    truth = made.search(queries, 10, effort="exact").labels
    found = made.search(queries, 10).labels
    return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)]))


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> ExplorationFiles:
    """An exploration of real indexes over the rows of an index."""
    files = ExplorationFiles(tmp_path_factory.mktemp("tuning"))
    assert give_sample(index_of(ROWS), files, TuningGoal(0.9), 2) == ""
    files.explore(lambda _: None)
    return files


def test_an_exploration_tries_every_kind_and_its_recall_holds(explored: ExplorationFiles) -> None:
    """All kinds are among the settings; more recall never comes from less effort, and the choice reaches the goal."""
    found = explored.result()
    assert found is not None
    assert found.chosen is not None
    assert found.chosen.sure >= 0.9
    assert {each.setting.kind for each in found.front} <= {"exact", "graph", "ivfpq"}
    assert found.explored > 50
    measured = _measured(explored)
    assert {(each.asked) for each in measured.lists} == {64}
    codings = [each.coding for each in measured.lists]
    assert codings[0] == USUAL
    assert set(codings) <= set(space.CODINGS)
    assert measured.graphs[0].links == 16
    for trial in measured.graphs:
        efforts = [each.ef for each in trial.options]
        assert efforts == sorted(efforts)
        assert [e.recall for e in trial.options] == sorted(e.recall for e in trial.options)


def test_parameters_move_with_the_goal(explored: ExplorationFiles) -> None:
    """A higher goal needs no less of anything: predictions of the best are monotone in it."""
    measured = _measured(explored)
    best = []
    for goal in (0.5, 0.8, 0.9, 0.95, 0.99):
        settings = choice.judged(choice.explored(measured, ROWS, 0), TuningGoal(goal))
        chosen = choice.best(settings)
        assert chosen is not None
        best.append(chosen)
    assert [each.qps for each in best] == sorted((each.qps for each in best), reverse=True)
    assert best[0].setting != best[-1].setting
    reached = [
        min(e.setting.effort for e in choice.judged(choice.explored(measured, ROWS, 0), TuningGoal(goal))
            if not e.why and e.setting.kind == "graph")
        for goal in (0.8, 0.95, 0.99)
    ]  # fmt: skip
    assert reached == sorted(reached)


def _measured(files: ExplorationFiles) -> Any:
    """Return an exploration's measurements, read again from its file."""
    return Known(files.directory).all()


def test_an_exploration_goes_on_where_it_was_killed(explored: ExplorationFiles) -> None:
    """What was measured before, less a half-written line, is not measured again: the result is the same."""
    before, path = explored.result(), explored.directory / "measured.jsonl"
    whole = path.read_bytes()
    (explored.directory / "result.json").unlink()
    path.write_bytes(whole + b'{"lists":{"asked":12')
    steps: list[str] = []
    again = explored.explore(steps.append)
    assert again == before
    assert not any("tried" in step for step in steps)
    assert path.read_bytes() == whole


def test_too_few_rows_cannot_be_tuned_by(tmp_path: Path) -> None:
    """A sentence says how many are needed, and nothing is written."""
    files = ExplorationFiles(tmp_path / "tuning")
    assert "too few to tune by" in give_sample(index_of(100), files, TuningGoal(0.9), 1)
    assert files.work() is None


PLANS = [
    IndexSetting("graph", links=8, effort=20),
    IndexSetting("ivfpq", lists=64, effort=4, depth=4),
    IndexSetting("ivfpq", lists=64, effort=4, depth=4, code_bits=4, rotate=False),
]


@pytest.mark.parametrize("setting", PLANS, ids=lambda each: f"{each.kind}-{each.code_bits}")
def test_an_index_is_built_by_a_plan_and_proved(setting: IndexSetting, tmp_path: Path) -> None:
    """The kind and its parameters are the plan's, the recall is proved by queries of its own, and is remembered."""
    made = index_of(ROWS)
    plan = IndexPlan("t1", setting, 0.9, ROWS)
    assert made.followed.follow(plan)
    settle(made)
    measured = made.followed.now.measured
    assert made.now.kind == made.now.stats().path == setting.kind
    if setting.kind == "ivfpq":
        coding = {"code_bits": setting.code_bits, "rotate": setting.rotate}
        assert explain(made, SearchCost(), 10)["coding"] == coding
    assert measured is not None
    assert measured.queries > 100
    assert recall(made) >= 0.85
    assert "tuning t1" in made.choice().why
    assert made.followed.threads(2) == 1  # a batch is divided as the plan says
    timed = measure(made, measured, SYSTEM)
    assert (timed.recall, timed.effort) == (measured.recall, made.now.stats().effort)
    assert timed.qps > 0
    file = PlanFile(tmp_path / "plan.json")
    file.keep(made.followed.now)
    assert PlanFile(tmp_path / "plan.json").read() == made.followed.now

    # Another plan of the same kind is built beside the searches; going back to none keeps to what fits by itself.
    other = {"graph": IndexSetting("graph", links=16), "ivfpq": IndexSetting("ivfpq", lists=70)}
    assert made.followed.follow(IndexPlan("t2", other[setting.kind], 0.8, ROWS))
    settle(made)
    assert made.followed.now.measured is not None
    assert made.followed.now.before is None
    made.followed.follow(None)
    settle(made)
    assert made.now.kind == "exact"


def test_a_plan_that_falls_short_leaves_the_index_that_there_was() -> None:
    """What cannot be built is refused with the reason, once; the plan before stays in force, and its index."""
    made = index_of(ROWS)
    good = IndexPlan("good", IndexSetting("graph", links=8), 0.8, ROWS)
    made.followed.follow(good)
    settle(made)
    kept = made.now.snapshot()

    def fails(*_: Any) -> Any:
        raise MemoryError("no room for it")

    made._trainer = fails
    bad = IndexPlan("bad", IndexSetting("ivfpq", lists=64), 0.9, ROWS)
    made.followed.follow(bad)
    settle(made)
    now = made.followed.now
    assert (now.plan, now.refused, now.why) == (good, "bad", "no room for it")
    assert now.measured is not None
    assert made.now.kind == "graph"
    after = made.now.snapshot()
    assert kept is not None
    assert after is not None
    assert (kept.version, kept.effort) == (after.version, after.effort)
    assert not made.followed.follow(bad)  # it is not tried again


def test_an_index_whose_plan_was_given_up_meanwhile_is_not_used() -> None:
    """A tuning that is cancelled while its index is built leaves the index that there was."""
    made = index_of(ROWS)

    def given_up(*args: Any, **more: Any) -> Any:
        made.followed.follow(None)
        return train(*args, **more)

    made._trainer = given_up
    made.followed.follow(IndexPlan("t", IndexSetting("ivfpq", lists=64), 0.9, ROWS))
    settle(made)
    assert made.lists is None
    settle(made)  # as when it is woken since it follows another plan
    assert (made.now.kind, made.followed.now.plan) == ("exact", None)


def test_a_plan_lapses_when_the_rows_have_outgrown_it() -> None:
    """Four times the rows, or a quarter of them, want another plan."""
    plan = IndexPlan("t", IndexSetting("graph", links=8), 0.9, 1000)
    assert [holds(plan, live) for live in (249, 250, 4000, 4001)] == [False, True, True, False]
    followed = FollowedPlan()
    followed.follow(plan)
    assert followed.held("graph", 1000) == plan
    assert followed.held("ivfpq", 1000) is None
    assert followed.due("graph", 5000) is None


def test_latency_over_machines_is_that_of_the_slowest() -> None:
    """The median over 128 machines is the 99.46th percentile of one; a tail makes it grow, no tail does not."""
    tail = np.random.default_rng(3).exponential(0.001, 20_000)
    drawn = over_machines(tail.tolist(), 128, draws=50_000, seed=1)
    assert np.median(drawn) == pytest.approx(np.quantile(tail, 0.9946), rel=0.03)
    drawn_of = [over_machines(tail.tolist(), n, draws=9999, seed=1) for n in (1, 16, 1024)]
    medians = [float(np.median(each)) for each in drawn_of]
    assert medians == sorted(medians)
    assert np.ptp(over_machines([0.001] * 9, 1024, draws=99, seed=1)) == pytest.approx(0.0)
    assert [network_s(n, 512, 120) for n in (1, 2)] == [0.0, pytest.approx(32.26e-6, rel=0.01)]


def test_an_exploration_without_work_says_so(tmp_path: Path) -> None:
    """A directory that holds no sample is refused in a sentence."""
    with pytest.raises(ValueError, match="no work to explore"):
        ExplorationFiles(tmp_path).explore(lambda _: None)
