from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index.port import EffortPlan
from services.vector_search.search_cost import BudgetPicker, SearchCost, largest_fitting
from tests.support.clock import ManualClock

LADDER = (10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
K = 10


def plans(queries: int, tail: int = 0) -> list[EffortPlan]:
    """The ladder of a graph for a batch, with the factors that the kind names."""
    return [
        EffortPlan("graph", ef, (queries, queries * ef, tail * queries, K * queries))
        for ef in LADDER
    ]


def true_s(plan: EffortPlan, slowness: float = 1.0) -> float:
    """What the simulated machine takes for a plan, on average."""
    walked, kept, compared, returned = plan.factors
    linear = 5e-5 + 2e-5 * walked + 1.1e-6 * kept + 1e-8 * compared + 1e-6 * returned
    return slowness * linear


# -- the choice


@given(
    seconds=st.lists(st.floats(0, 10) | st.just(math.inf), min_size=1, max_size=len(LADDER)),
    budgets=st.tuples(st.floats(-1, 10), st.floats(-1, 10)),
)
def test_a_larger_budget_never_gives_a_smaller_effort(
    seconds: list[float], budgets: tuple[float, float]
) -> None:
    """The predicted time fits or the effort is the least; more time never takes effort away; no larger effort fits."""
    ladder = plans(1)[: len(seconds)]
    predicted = dict(zip(ladder, seconds, strict=True))
    less_s, more_s = sorted(budgets)
    less, more = (largest_fitting(ladder, predicted.__getitem__, s) for s in (less_s, more_s))

    for chosen, left_s in ((less, less_s), (more, more_s)):
        assert chosen.predicted_s == predicted[chosen.plan]
        assert chosen.fits == (chosen.predicted_s <= left_s)
        assert chosen.fits or chosen.plan is ladder[0]
        larger = ladder[ladder.index(chosen.plan) + 1 :]
        assert all(predicted[plan] > left_s for plan in larger)
    assert ladder.index(more.plan) >= ladder.index(less.plan)


def test_what_nothing_is_known_of_does_not_fit() -> None:
    """Before anything was measured the least effort is used, and said not to fit."""
    chosen = largest_fitting(plans(1), SearchCost().at_most_s, 1e9)

    assert (chosen.plan.effort, chosen.fits, chosen.predicted_s) == (10, False, math.inf)


def test_the_picker_goes_by_the_time_that_is_left() -> None:
    """What has passed when the choice is made has been taken off the budget."""
    clock, cost = ManualClock(100.0), SearchCost()
    cost.calibrate([(plan, true_s(plan)) for plan in plans(1)])
    picker = BudgetPicker(cost, clock, due_s=100.01)
    early = picker(plans(1))
    clock.now_s = 100.0096
    late = picker(plans(1))

    assert (early.effort, late.effort) == (1024, 128)
    assert picker.fit is not None
    assert picker.fit.predicted_s <= 0.0004


# -- the cost


def test_probes_of_few_efforts_predict_the_others() -> None:
    """Two batches at three efforts are enough for the line that a path's time lies on."""
    cost = SearchCost()
    probed = [(p, true_s(p)) for q in (1, 16) for p in plans(q) if p.effort in {10, 96, 1024}]
    cost.calibrate(probed)

    for plan in [*plans(1), *plans(4), *plans(256)]:
        assert cost.seconds(plan) == pytest.approx(true_s(plan), rel=0.02)
        assert cost.at_most_s(plan) >= cost.seconds(plan)


def test_a_cost_follows_a_machine_that_has_become_slower() -> None:
    """Searches that run tell what they take now."""
    cost = SearchCost()
    cost.calibrate([(p, true_s(p)) for q in (1, 16) for p in plans(q)])
    rng = random.Random(1)
    for _ in range(600):
        plan = rng.choice(plans(rng.choice((1, 2, 8))))
        cost.observe(plan, true_s(plan, 3.0))

    for plan in plans(4):
        assert cost.seconds(plan) == pytest.approx(true_s(plan, 3.0), rel=0.1)


def test_a_path_that_was_not_probed_is_learned_from_searches() -> None:
    """The first search of a path says what it takes; impossible times teach nothing."""
    cost, plan = SearchCost(), EffortPlan("filtered-exact", "exact", (100.0, 10.0, 10.0, 10.0))
    cost.observe(plan, 0.0)
    assert cost.seconds(plan) == math.inf
    cost.observe(plan, 0.002)
    assert cost.seconds(plan) == pytest.approx(0.002)


def test_searches_that_end_later_where_little_time_is_left_are_promised_less() -> None:
    """A search that only runs late when its budget is short of time is late within no margin that others teach."""
    rng, cost, least = random.Random(3), SearchCost(), plans(1)[0]
    cost.calibrate([(plan, true_s(plan)) for plan in plans(1)])
    for _ in range(1500):
        cost.observe(least, true_s(least) * rng.lognormvariate(0, 0.05))
    kept = promised = 0
    for _ in range(3000):
        left_s = rng.uniform(1.0, 1.6) * true_s(least)
        fit = largest_fitting([least], cost.at_most_s, left_s)
        took_s = true_s(least) * (1.3 if rng.random() < 0.03 else 1.0)
        cost.ended(fit, took_s)
        kept, promised = kept + (fit.fits and took_s <= left_s), promised + fit.fits

    assert promised > 500
    assert kept / promised >= 0.99


@pytest.mark.parametrize("seed", range(4))
def test_99_of_100_budgets_are_kept(seed: int) -> None:
    """By an injected clock: random batches and budgets on a machine with noise, pauses and a slowdown of 2.5 times.

    Of the searches that were said to fit, at least 99 % end in time, and what time there is is used: efforts below the
    largest take more than a third of their budget.
    """
    rng, clock, cost = random.Random(seed), ManualClock(), SearchCost()

    def run(plan: EffortPlan, slowness: float) -> float:
        seconds = true_s(plan, slowness) * rng.lognormvariate(0, 0.15)
        if rng.random() < 0.005:  # another process has the core
            seconds += rng.uniform(0.001, 0.01)
        began_s = clock.now_s
        clock.now_s += seconds
        return clock.now_s - began_s

    # Probes run in the background, where everything takes twice as long.
    probed = [p for q in (1, 16) for p in plans(q) if p.effort in {10, 96, 1024}]
    cost.calibrate([(plan, run(plan, 2.0)) for plan in probed])
    for slowness in (1.0, 2.5, 1.0):
        fitting = kept = 0
        used: list[float] = []
        for _ in range(2500):
            ladder = plans(rng.choice((1, 1, 1, 2, 4, 8, 16, 64)))
            budget_s = math.exp(rng.uniform(math.log(2e-4), math.log(0.05)))
            picker = BudgetPicker(cost, clock, clock.now_s + budget_s)
            plan = picker(ladder)
            took_s = run(plan, slowness)
            cost.observe(plan, took_s)
            if picker.fit is not None:
                cost.ended(picker.fit, took_s)
            assert picker.fit is not None
            if picker.fit.fits:
                fitting, kept = fitting + 1, kept + (took_s <= budget_s)
                used += [took_s / budget_s] if plan.effort != LADDER[-1] else []
        assert kept / fitting >= 0.99
        assert sum(used) / len(used) > 1 / 3
