"""Weighted sums over measurements, from which a linear model can be fitted repeatedly, with forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


class Moments:
    """Weighted sums over measurements for the model seconds = b + a1 * x1 + a2 * x2 + …, with relative errors.

    `fade` lowers the weight of older measurements, except for `lasting` ones, so that coefficients without recent
    measurements keep their values.
    """

    def __init__(self, factors: int) -> None:
        """Begin without measurements; `factors` is the number of x."""
        size = self._size = factors + 1
        self._fading = [[0.0] * size for _ in range(size)], [0.0] * size
        self._lasting = [[0.0] * size for _ in range(size)], [0.0] * size
        self._subsets = [
            chosen for count in range(1, size + 1) for chosen in combinations(range(size), count)
        ]

    def add(
        self, x: Sequence[float], seconds: float, *, weight: float = 1.0, lasting: bool = False
    ) -> None:
        """Add one measurement of `seconds` above 0."""
        row = [1 / seconds, *(each / seconds for each in x)]
        gram, target = self._lasting if lasting else self._fading
        for i, left in enumerate(row):
            target[i] += weight * left
            line = gram[i]
            for j, right in enumerate(row):
                line[j] += weight * left * right

    def fade(self, memory: float) -> None:
        """Multiply the weights of all measurements so far, except lasting ones, by `memory`."""
        gram, target = self._fading
        for i in range(self._size):
            target[i] *= memory
            gram[i] = [memory * value for value in gram[i]]

    def solve(self) -> list[float]:
        """Return the non-negative b, a1, a2, … with the least squared relative error.

        There are few unknowns, so each subset of them is solved exactly, and the best feasible solution is returned.
        """
        size = self._size
        gram = [
            [self._fading[0][i][j] + self._lasting[0][i][j] for j in range(size)]
            for i in range(size)
        ]
        target = [self._fading[1][i] + self._lasting[1][i] for i in range(size)]
        best, best_gain = [0.0] * size, 0.0
        for chosen in self._subsets:
            solution = _solve(gram, target, chosen)
            if solution is None or min(solution) < 0:
                continue
            full = [0.0] * size
            for place, value in zip(chosen, solution, strict=True):
                full[place] = value
            # At a subset's optimum the squared error is a constant minus this gain.
            gain = sum(full[i] * target[i] for i in range(size))
            if gain > best_gain + 1e-9 * abs(best_gain):
                best, best_gain = full, gain
        return best


def _solve(
    gram: list[list[float]], target: list[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Solve the normal equations for the chosen unknowns; None if they do not determine the unknowns."""
    size = len(chosen)
    scale = [gram[c][c] ** 0.5 for c in chosen]
    if not all(scale):
        return None
    matrix = [
        [gram[c][d] / scale[i] / scale[j] for j, d in enumerate(chosen)] + [target[c] / scale[i]]
        for i, c in enumerate(chosen)
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
