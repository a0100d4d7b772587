"""Cost of a shard's searches, learned from those that ran, and the largest effort that a time budget allows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.clock import Clock
from common.cost.online import Lateness, OnlineFit
from services.vector_search.index.port import EffortPlan, Path

# The share of searches that end within the time they were predicted to take at most, by each of two measures.
_QUANTILE = 0.995
_WINDOW = 1000
# The margin of a prediction before any search has been observed: half of the prediction, at most ten seconds.
_FIRST_SHARE, _FIRST_S = 0.5, 10.0
# How fast predictions follow a machine that is slowed down for a while: the weight of the slowness known before.
_QUICK = 0.9
# Searches after which a fit is solved again: solving takes longer than some searches.
_SOLVE_EVERY = 16


class BudgetFit(NamedTuple):
    """The plan that a time budget allows, the most it is predicted to take, and whether that is within the budget."""

    plan: EffortPlan
    predicted_s: float
    fits: bool


def largest_fitting(
    plans: Sequence[EffortPlan], at_most_s: Callable[[EffortPlan], float], left_s: float
) -> BudgetFit:
    """Return the plan of the largest effort that is predicted to end within `left_s`, else of the least effort.

    `plans` has at least one plan, and begins with the least effort.
    """
    for plan in reversed(plans):
        seconds = at_most_s(plan)
        if seconds <= left_s:
            return BudgetFit(plan, seconds, fits=True)
    return BudgetFit(plans[0], at_most_s(plans[0]), fits=False)


class Margin:
    """The margin added to predicted seconds: the smaller of one learned in seconds and one learned as a share.

    A pause during a short search raises the share only, so not the margin of long searches; the spread of long searches
    raises the seconds only, so not the margin of short searches.
    """

    def __init__(self, first_s: float, first_share: float) -> None:
        self._late = Lateness(_QUANTILE, window=_WINDOW, prior=first_s)
        self._share = Lateness(_QUANTILE, window=_WINDOW, prior=first_share)

    def seconds(self, predicted_s: float) -> float:
        """Return the margin of a prediction."""
        return min(self._late.value, self._share.value * predicted_s)

    def add(self, predicted_s: float, seconds: float) -> None:
        """Learn from a search that took `seconds`."""
        self._late.add(seconds - predicted_s)
        if predicted_s > 0:
            self._share.add(seconds / predicted_s - 1)


class SearchCost:
    """Predicts the seconds of a batch by its plan: one linear model a search path, fitted again as searches end.

    A fit changes over many searches; while searches take longer than fitted, predictions rise by the same factor at
    once. The picker takes the largest effort that fits a time budget, so searches with a budget are late more often
    than others, and their lateness is learned apart. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fits: dict[Path, OnlineFit] = {}
        self._slowness = 1.0  # recent measured seconds / fitted seconds
        self._late = Margin(_FIRST_S, _FIRST_SHARE)
        self._promised = Margin(0.0, 0.0)

    def calibrate(self, probes: Sequence[tuple[EffortPlan, float]]) -> None:
        """Replace all fits by fits of probes: plans and the seconds that each took."""
        by_path: dict[Path, list[tuple[Sequence[float], float]]] = {}
        for plan, seconds in probes:
            by_path.setdefault(plan.path, []).append((plan.factors, seconds))
        fits = {
            path: OnlineFit(measured, factors=len(measured[0][0]), solve_every=_SOLVE_EVERY)
            for path, measured in by_path.items()
        }
        with self._lock:
            self._fits, self._slowness = fits, 1.0

    def seconds(self, plan: EffortPlan) -> float:
        """Return the expected seconds of a batch; infinity before any batch of its path was measured."""
        fit = self._fits.get(plan.path)
        if fit is None:
            return math.inf
        return max(1.0, self._slowness) * fit.seconds(plan.factors)

    def at_most_s(self, plan: EffortPlan) -> float:
        """Return the seconds within which nearly every batch of a plan ends."""
        expected_s = self.seconds(plan)
        usual_s = expected_s + self._late.seconds(expected_s)
        return usual_s + self._promised.seconds(usual_s)

    def ended(self, fit: BudgetFit, seconds: float) -> None:
        """Learn whether a batch that was predicted to fit its time budget ended in the predicted seconds."""
        if fit.fits and seconds > 0:
            with self._lock:
                expected_s = self.seconds(fit.plan)
                self._promised.add(expected_s + self._late.seconds(expected_s), seconds)

    def observe(self, plan: EffortPlan, seconds: float) -> None:
        """Learn from a batch that took `seconds`."""
        if not seconds > 0:
            return
        with self._lock:
            fit = self._fits.get(plan.path)
            if fit is None:
                first = OnlineFit(
                    [(plan.factors, seconds)],
                    factors=len(plan.factors),
                    solve_every=_SOLVE_EVERY,
                )
                self._fits = {**self._fits, plan.path: first}
                return
            expected_s = max(1.0, self._slowness) * fit.seconds(plan.factors)
            ratio = fit.observe(plan.factors, seconds)
            self._slowness += (1 - _QUICK) * (min(max(ratio, 0.2), 5.0) - self._slowness)
            self._late.add(expected_s, seconds)


class BudgetPicker:
    """Picks the plan that one search's time budget allows, and keeps the choice in `fit` for the report."""

    def __init__(self, cost: SearchCost, clock: Clock, due_s: float) -> None:
        self._cost, self._clock, self._due_s = cost, clock, due_s
        self.fit: BudgetFit | None = None

    def __call__(self, plans: Sequence[EffortPlan]) -> EffortPlan:
        """Return the plan of the largest effort that fits the time left now."""
        left_s = self._due_s - self._clock.perf_s()
        self.fit = largest_fitting(plans, self._cost.at_most_s, left_s)
        return self.fit.plan
