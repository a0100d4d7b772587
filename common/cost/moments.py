"""What was measured, summed up: enough to fit the linear model again and again, and to forget."""

from __future__ import annotations

from itertools import combinations

UNKNOWNS = 3
_SUBSETS = [chosen for size in (1, 2, 3) for chosen in combinations(range(UNKNOWNS), size)]


class Moments:
    """Weighted sums over measurements of seconds = b + a * items + c * tokens, with errors relative to the seconds.

    `fade` lets older ones weigh less; what was added as `lasting` does not fade, so that directions in which nothing
    has been measured lately stay where they were.
    """

    def __init__(self) -> None:
        self._fading = [[0.0] * UNKNOWNS for _ in range(UNKNOWNS)], [0.0] * UNKNOWNS
        self._lasting = [[0.0] * UNKNOWNS for _ in range(UNKNOWNS)], [0.0] * UNKNOWNS

    def add(
        self,
        items: int,
        tokens: int,
        seconds: float,
        *,
        weight: float = 1.0,
        lasting: bool = False,
    ) -> None:
        """Add one measurement of `seconds` above 0."""
        row = (1 / seconds, items / seconds, tokens / seconds)
        gram, target = self._lasting if lasting else self._fading
        for i in range(UNKNOWNS):
            target[i] += weight * row[i]
            for j in range(UNKNOWNS):
                gram[i][j] += weight * row[i] * row[j]

    def fade(self, memory: float) -> None:
        """Multiply the weight of everything added so far, but what is lasting, by `memory`."""
        gram, target = self._fading
        for i in range(UNKNOWNS):
            target[i] *= memory
            gram[i] = [memory * value for value in gram[i]]

    def solve(self) -> tuple[float, float, float]:
        """Return the non-negative (b, a, c) with the least squared relative error.

        There are three unknowns, so each subset of them is solved exactly and the best feasible one kept.
        """
        gram = [
            [self._fading[0][i][j] + self._lasting[0][i][j] for j in range(UNKNOWNS)]
            for i in range(UNKNOWNS)
        ]
        target = [self._fading[1][i] + self._lasting[1][i] for i in range(UNKNOWNS)]
        best, best_gain = (0.0, 0.0, 0.0), 0.0
        for chosen in _SUBSETS:
            solution = _solve(gram, target, chosen)
            if solution is None or min(solution) < 0:
                continue
            full = [0.0, 0.0, 0.0]
            for place, value in zip(chosen, solution, strict=True):
                full[place] = value
            # At a subset's optimum the squared error is a constant less this.
            gain = sum(full[i] * target[i] for i in range(UNKNOWNS))
            if gain > best_gain + 1e-9 * abs(best_gain):
                best, best_gain = (full[0], full[1], full[2]), gain
        return best


def _solve(
    gram: list[list[float]], target: list[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Solve the normal equations for the chosen unknowns; None if they are not determined."""
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
