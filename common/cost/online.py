"""The cost model as it runs: re-fitted from every batch, deaf to single outliers, with what it may be off by."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from common.cost.linear import LinearCost, Probe
from common.cost.moments import Moments

# A batch's weight halves every 70 batches or so.
_MEMORY = 0.99
# Probes of the start keep a little weight each: they decide only what no batch has told lately.
_LASTING = 0.05
_RECENT = 50
# Errors larger than so many usual ones are outliers; one of a device that has changed is soon the usual one.
_OUTLIER = 3.0
_LEAST_ERROR = 0.02


class OnlineFit:
    """seconds = b + a1 * x1 + a2 * x2 + …, learned recursively (least squares with forgetting, Huber's weights).

    `parts` are b, a1, a2, …, none negative; it is solved anew after every `solve_every` observations.
    """

    def __init__(
        self,
        probes: Sequence[tuple[Sequence[float], float]],
        *,
        factors: int,
        solve_every: int = 1,
    ) -> None:
        """Begin with what was probed: pairs of x and seconds."""
        self._moments = Moments(factors)
        for x, seconds in probes:
            self._moments.add(x, seconds, weight=_LASTING, lasting=True)
        self.parts = self._moments.solve()
        self._every, self._unsolved = solve_every, 0
        self._errors: deque[float] = deque(maxlen=_RECENT)
        self._share_explained = Explained()

    @property
    def r2(self) -> float:
        """The share of the seconds' variance that the predictions explained, over what is remembered."""
        return self._share_explained.value

    def seconds(self, x: Sequence[float]) -> float:
        """Predict."""
        return self.parts[0] + sum(a * each for a, each in zip(self.parts[1:], x, strict=True))

    def observe(self, x: Sequence[float], seconds: float, *, learn: bool = True) -> float:
        """Learn from what ran undisturbed; return measured over predicted seconds (1 if none were)."""
        predicted = self.seconds(x)
        ratio = seconds / predicted if predicted > 0 else 1.0
        self._share_explained.add(predicted, seconds, _MEMORY)
        if learn and seconds > 0:
            self._moments.fade(_MEMORY)
            self._moments.add(x, seconds, weight=self._weight(abs(ratio - 1)))
            self._unsolved += 1
            if self._unsolved >= self._every:
                self.parts, self._unsolved = self._moments.solve(), 0
        return ratio

    def _weight(self, error: float) -> float:
        usual = sorted(self._errors)[len(self._errors) // 2] if self._errors else math.inf
        self._errors.append(error)
        limit = _OUTLIER * max(usual, _LEAST_ERROR)
        return 1.0 if error <= limit else limit / error


class OnlineCost:
    """A device's costs of batches, as they are learned."""

    def __init__(self, probes: Sequence[Probe], *, fixed: LinearCost | None = None) -> None:
        """Begin with what was probed; a `fixed` model is known and never changes."""
        self._fixed = fixed
        self._fit = OnlineFit(
            [((probe.items, probe.tokens), probe.seconds) for probe in probes], factors=2
        )
        if fixed is not None:
            self._fit.parts = list(fixed)
        self.cost = LinearCost(*self._fit.parts)

    @property
    def r2(self) -> float:
        """The share of the seconds' variance that the predictions explained, over what is remembered."""
        return self._fit.r2

    def observe(self, items: int, tokens: int, seconds: float) -> float:
        """Learn from a batch that ran undisturbed; return measured over predicted seconds (1 if none were)."""
        ratio = self._fit.observe((items, tokens), seconds, learn=self._fixed is None)
        self.cost = LinearCost(*self._fit.parts)
        return ratio


class Explained:
    """Share of variance explained by a prediction (r squared), with forgetting."""

    def __init__(self) -> None:
        self._n = self._sum = self._square = self._error = 0.0

    def add(self, predicted: float, measured: float, memory: float = 1.0) -> None:
        """Add one pair; older ones weigh `memory` times what they did."""
        self._n = memory * self._n + 1
        self._sum = memory * self._sum + measured
        self._square = memory * self._square + measured * measured
        self._error = memory * self._error + (measured - predicted) ** 2

    @property
    def value(self) -> float:
        """1 = all explained; 0 = no better than the mean, or nothing to explain."""
        spread = self._square - self._sum * self._sum / self._n if self._n else 0.0
        if spread <= 1e-12 * self._square:
            return 0.0
        return max(0.0, 1 - self._error / spread)


class Lateness:
    """Margin by which steps end later than predicted: a high quantile of the latest residuals.

    Before there are enough of them to know it, `prior` stands for those not seen yet; it fades over `fades` residuals
    (0: over as many as the quantile needs).
    """

    def __init__(
        self,
        quantile: float = 0.999,
        *,
        window: int = 2000,
        prior: float = 0.0,
        fades: int = 0,
    ) -> None:
        self._quantile, self._window, self._prior = quantile, window, prior
        self._fades = fades or math.ceil(1 / (1 - quantile))
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, residual: float) -> None:
        """Note one residual (measured - predicted); early is negative."""
        if not math.isfinite(residual):
            return
        self._order.append(residual)
        insort(self._sorted, residual)
        if len(self._order) > self._window:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    @property
    def value(self) -> float:
        """The margin to add to a prediction; never negative."""
        count = len(self._sorted)
        rank = min(count, math.ceil(self._quantile * count)) - 1
        found = self._sorted[rank] if count else 0.0
        return max(0.0, found, self._prior * (1 - count / self._fades))
