"""When a generation's tokens came, as its router saw them."""

from __future__ import annotations

import time

from common.messages import GenerateResult, Piece
from services.router import metrics


class Timing:
    """One answer's times, counted once it is complete; `began` is by time.perf_counter()."""

    def __init__(self, model: str, began: float) -> None:
        self._model, self._began = model, began
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def note(self, piece: Piece) -> None:
        """Note a piece that has come just now."""
        if not piece.tokens:
            return
        now = time.perf_counter()
        if not self._first:
            metrics.TTFT.labels(self._model).observe(now - self._began)
        self._first.setdefault(piece.choice, now)
        self._last[piece.choice] = now
        self._tokens[piece.choice] = self._tokens.get(piece.choice, 0) + len(piece.tokens)

    def end(self, result: GenerateResult) -> None:
        """Count the answer."""
        metrics.TOKENS.labels(self._model, "output").inc(result.completion_tokens)
        for choice, tokens in self._tokens.items():
            took_s = self._last[choice] - self._first[choice]
            if tokens > 1 and took_s > 0:
                metrics.TPOT.labels(self._model).observe(took_s / (tokens - 1))
