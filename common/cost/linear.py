"""A linear model of a batch's seconds, fitted from probes, and the depth a deadline allows by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

PARCEL_ITEMS = 32
PARCEL_TOKENS = 8192
# A text this short costs a lane the least tokens; depth in items must let such texts fill the deadline.
SHORT_TEXT_TOKENS = 8
TYPICAL_TEXT_TOKENS = 64


class Probe(NamedTuple):
    """One measured batch."""

    items: int
    tokens: int
    seconds: float


class Depth(NamedTuple):
    """How much a worker may hold, queued and running."""

    items: int
    tokens: int


class LinearCost(NamedTuple):
    """Seconds of a batch = beta_s + alpha_items_s * items + alpha_tokens_s * tokens; none is negative."""

    beta_s: float
    alpha_items_s: float
    alpha_tokens_s: float

    def seconds(self, items: int, tokens: int) -> float:
        """Predict the seconds of one batch."""
        return self.beta_s + self.alpha_items_s * items + self.alpha_tokens_s * tokens

    def scaled(self, factor: float) -> LinearCost:
        """Return the model of a device that is `factor` times slower."""
        return LinearCost(*(factor * part for part in self))

    def batch_tokens(self, overhead: float = 0.02) -> int:
        """Return the tokens of a batch whose fixed cost is at most `overhead` of it, within [1024, 8192].

        Larger batches would be hardly faster per token, and everything in them would wait for the last.
        """
        marginal = self.alpha_tokens_s + self.alpha_items_s / TYPICAL_TEXT_TOKENS
        if marginal <= 0:
            return PARCEL_TOKENS
        return min(PARCEL_TOKENS, max(1024, int(self.beta_s / overhead / marginal)))

    def depth(self, slo_s: float, *, batch_items: int, batch_tokens: int) -> Depth:
        """Return what can be done within `slo_s` when it runs in batches of at most the given size.

        Never less than one full parcel: a worker that may not hold one could never serve one.
        """
        left_s = max(0.0, slo_s - self.beta_s)
        per_token = self.alpha_tokens_s + self.alpha_items_s / TYPICAL_TEXT_TOKENS
        per_token += self.beta_s / batch_tokens
        per_item = self.alpha_items_s + self.alpha_tokens_s * SHORT_TEXT_TOKENS
        per_item += self.beta_s / batch_items
        return Depth(
            max(PARCEL_ITEMS, _whole(left_s, per_item)),
            max(PARCEL_TOKENS, _whole(left_s, per_token)),
        )


def _whole(total: float, each: float) -> int:
    limit = 10_000_000
    return limit if each <= total / limit else math.floor(total / each + 1e-9)


def fit(probes: Sequence[Probe]) -> LinearCost:
    """Fit the non-negative model with the least squared relative error; ValueError without probes.

    There are three unknowns, so each subset of them is solved exactly and the best feasible one kept.
    """
    if not probes or any(not probe.seconds > 0 for probe in probes):
        raise ValueError("fit: expected at least one probe, each with seconds above 0")
    rows = [
        [1 / p.seconds, p.items / p.seconds, p.tokens / p.seconds] for p in probes
    ]  # in units of the measured seconds: errors are relative
    best, best_error = [0.0, 0.0, 0.0], math.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            solution = _solve(rows, chosen)
            if solution is None or min(solution) < 0:
                continue
            full = [0.0, 0.0, 0.0]
            for place, value in zip(chosen, solution, strict=True):
                full[place] = value
            error = sum(
                (sum(a * b for a, b in zip(row, full, strict=True)) - 1) ** 2 for row in rows
            )
            if error < best_error * (1 - 1e-9):
                best, best_error = full, error
    return LinearCost(*best)


def _solve(rows: list[list[float]], chosen: tuple[int, ...]) -> list[float] | None:
    """Solve the normal equations for the chosen unknowns; None if they are not determined."""
    size = len(chosen)
    scale = [max(abs(row[c]) for row in rows) or 1.0 for c in chosen]
    columns = [[row[c] / scale[i] for i, c in enumerate(chosen)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in columns) for j in range(size)]
        + [sum(row[i] for row in columns)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(matrix[r][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(size):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]
