"""Token latencies of one generation, as its router sees them: time to the first token, mean time between tokens."""

from __future__ import annotations

from common import tracing
from common.clock import Clock
from common.wire.results import Piece
from services.router import metrics


class TokenLatency:
    """The latencies of one answer; `began` is the request's time by the clock's `perf_s`.

    Only the reader who sent the request `counts`.
    """

    def __init__(self, clock: Clock, model: str, began: float, *, counts: bool) -> None:
        self._clock, self._model, self._began, self._counts = clock, model, began, counts
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def note(self, piece: Piece) -> None:
        """Note a piece that has arrived just now."""
        if not piece.tokens or not self._counts:
            return
        now = self._clock.perf_s()
        if not self._first:
            tracing.current().add_event("first token")
            metrics.FIRST_TOKEN.labels(self._model).observe(now - self._began)
        self._first.setdefault(piece.choice, now)
        self._last[piece.choice] = now
        self._tokens[piece.choice] = self._tokens.get(piece.choice, 0) + len(piece.tokens)

    def end(self) -> None:
        """Count the answer, which is complete."""
        for choice, tokens in self._tokens.items():
            took_s = self._last[choice] - self._first[choice]
            if tokens > 1 and took_s > 0:
                metrics.PER_TOKEN.labels(self._model).observe(took_s / (tokens - 1))
