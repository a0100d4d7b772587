"""Online cost models: re-fitted after every batch, robust against single outliers, with a margin for their errors."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from common.cost.linear import LinearCost, Probe
from common.cost.moments import Moments

# The factor on a batch's weight for each later batch: it halves about every 70 batches.
_MEMORY = 0.99
# Probes at the start keep this small weight: they decide only where recent batches give no evidence.
_LASTING = 0.05
_RECENT = 50
# An error larger than this many median errors is an outlier; after a change of the device the median adapts soon.
_OUTLIER = 3.0
_LEAST_ERROR = 0.02


class OnlineFit:
    """The model seconds = b + a1 * x1 + a2 * x2 + …, fitted by least squares with forgetting and Huber's weights.

    `parts` are b, a1, a2, …, none negative; they are solved again after every `solve_every` observations.
    """

    def __init__(
        self,
        probes: Sequence[tuple[Sequence[float], float]],
        *,
        factors: int,
        solve_every: int = 1,
    ) -> None:
        """Begin with probes: pairs of x and seconds."""
        self._moments = Moments(factors)
        for x, seconds in probes:
            self._moments.add(x, seconds, weight=_LASTING, lasting=True)
        self.parts = self._moments.solve()
        self._every, self._unsolved = solve_every, 0
        self._errors: deque[float] = deque(maxlen=_RECENT)
        self._share_explained = Explained()

    @property
    def r2(self) -> float:
        """The share of the measured seconds' variance that the predictions explained, with forgetting."""
        return self._share_explained.value

    def seconds(self, x: Sequence[float]) -> float:
        """Predict the seconds for `x`."""
        return self.parts[0] + sum(a * each for a, each in zip(self.parts[1:], x, strict=True))

    def observe(self, x: Sequence[float], seconds: float, *, learn: bool = True) -> float:
        """Learn from an undisturbed run; return measured / predicted seconds (1 if nothing was predicted)."""
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
    """A device's cost model of batches, fitted online."""

    def __init__(self, probes: Sequence[Probe], *, fixed: LinearCost | None = None) -> None:
        """Begin with probes; a `fixed` model is used as given and never changes."""
        self._fixed = fixed
        self._fit = OnlineFit(
            [((probe.items, probe.tokens), probe.seconds) for probe in probes], factors=2
        )
        if fixed is not None:
            self._fit.parts = list(fixed)
        self.cost = LinearCost(*self._fit.parts)

    @property
    def r2(self) -> float:
        """The share of the measured seconds' variance that the predictions explained, with forgetting."""
        return self._fit.r2

    def observe(self, items: int, tokens: int, seconds: float) -> float:
        """Learn from a batch that ran undisturbed; return measured / predicted seconds (1 if nothing was predicted)."""
        ratio = self._fit.observe((items, tokens), seconds, learn=self._fixed is None)
        self.cost = LinearCost(*self._fit.parts)
        return ratio


class Explained:
    """The share of variance that predictions explain (r squared), with forgetting."""

    def __init__(self) -> None:
        self._n = self._sum = self._square = self._error = 0.0

    def add(self, predicted: float, measured: float, memory: float = 1.0) -> None:
        """Add one pair; the weights of older pairs are multiplied by `memory`."""
        self._n = memory * self._n + 1
        self._sum = memory * self._sum + measured
        self._square = memory * self._square + measured * measured
        self._error = memory * self._error + (measured - predicted) ** 2

    @property
    def value(self) -> float:
        """The share: 1 = all explained; 0 = no better than the mean, or no variance to explain."""
        spread = self._square - self._sum * self._sum / self._n if self._n else 0.0
        if spread <= 1e-12 * self._square:
            return 0.0
        return max(0.0, 1 - self._error / spread)


class Lateness:
    """The margin by which steps end later than predicted: a high quantile of the latest residuals.

    While there are too few residuals for the quantile, `prior` is the least margin; it fades linearly over `fades`
    residuals (0: over as many as the quantile needs).
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
        """Add one residual (measured - predicted), negative for an early end."""
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
