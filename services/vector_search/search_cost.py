"""Cost of searches of a shard, learned as they run, and the largest effort that a time budget allows by that."""

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
# A fit is solved anew after so many searches, as solving takes longer than some of them.
_SOLVE_EVERY = 16


class BudgetFit(NamedTuple):
    """The plan that a time budget allows, the most it is predicted to take, and whether that is within the budget."""

    plan: EffortPlan
    predicted_s: float
    fits: bool


def largest_fitting(
    plans: Sequence[EffortPlan], at_most_s: Callable[[EffortPlan], float], left_s: float
) -> BudgetFit:
    """Return the plan of the largest effort that is predicted to end within `left_s`, else that of the least.

    `plans` are those of a ladder, the least effort first; there is at least one.
    """
    for plan in reversed(plans):
        seconds = at_most_s(plan)
        if seconds <= left_s:
            return BudgetFit(plan, seconds, fits=True)
    return BudgetFit(plans[0], at_most_s(plans[0]), fits=False)


class Margin:
    """What to add to predicted seconds, learned in seconds and as a share of the prediction: the smaller one counts.

    So a pause of the machine does not weigh on long searches, nor their spread on short ones.
    """

    def __init__(self, first_s: float, first_share: float) -> None:
        self._late = Lateness(_QUANTILE, window=_WINDOW, prior=first_s)
        self._share = Lateness(_QUANTILE, window=_WINDOW, prior=first_share)

    def seconds(self, predicted_s: float) -> float:
        """Return the margin of a prediction."""
        return min(self._late.value, self._share.value * predicted_s)

    def add(self, predicted_s: float, seconds: float) -> None:
        """Learn from a search that took so long."""
        self._late.add(seconds - predicted_s)
        if predicted_s > 0:
            self._share.add(seconds / predicted_s - 1)


class SearchCost:
    """Predicts the seconds of a batch by its plan: one linear model a search path, fitted again as searches end.

    A fit changes over many searches; while searches take longer than fitted, predictions are lifted by the same factor
    at once. Searches that were said to fit a time budget are chosen among all by how little was left, so their lateness
    is learned apart. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fits: dict[Path, OnlineFit] = {}
        self._slowness = 1.0  # measured over fitted seconds of the latest searches
        self._late = Margin(_FIRST_S, _FIRST_SHARE)
        self._promised = Margin(0.0, 0.0)

    def calibrate(self, probes: Sequence[tuple[EffortPlan, float]]) -> None:
        """Begin anew with probes: plans and the seconds that each took."""
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
        """Return what a batch is expected to take; infinity where nothing is known of its path."""
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
        """Learn from a batch with a time budget whether it kept what was promised."""
        if fit.fits and seconds > 0:
            with self._lock:
                expected_s = self.seconds(fit.plan)
                self._promised.add(expected_s + self._late.seconds(expected_s), seconds)

    def observe(self, plan: EffortPlan, seconds: float) -> None:
        """Learn from a batch."""
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
    """Picks the plan that a time budget allows, and keeps the choice to be reported; for one search."""

    def __init__(self, cost: SearchCost, clock: Clock, due_s: float) -> None:
        self._cost, self._clock, self._due_s = cost, clock, due_s
        self.fit: BudgetFit | None = None

    def __call__(self, plans: Sequence[EffortPlan]) -> EffortPlan:
        """Pick, by the time that is left now."""
        left_s = self._due_s - self._clock.perf_s()
        self.fit = largest_fitting(plans, self._cost.at_most_s, left_s)
        return self.fit.plan
