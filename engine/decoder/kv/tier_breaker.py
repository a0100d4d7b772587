"""The circuit breaker of a tier: predicts the seconds to fetch pages, and decides whether to ask the tier. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

MISSES = 3  # misses in a row after which a tier is not asked
PAUSE_S = 5.0
LATE = 2.0  # a fetch that takes this many times the prediction is a miss
SLACK_S = 0.02
PROBE = 8  # pages of the first fetch, also of the first fetch after a pause
WEIGHT = 0.25


class TierBreaker:
    """The record of one tier's fetches: `came` and `failed` add fetches, `asks` and `predicted_s` evaluate them."""

    def __init__(self) -> None:
        self.page_s = 0.0  # recent mean seconds per page; 0: unknown
        self.misses = 0
        self.expected_s = self.took_s = 0.0  # seconds of all fetches, predicted and measured
        self._paused_until_s = 0.0
        self._learned_s = -PAUSE_S
        self._probes = True

    def asks(self, prices_s: Sequence[float], now_s: float) -> int:
        """Return the number of pages to ask for now, given the seconds of computing each page.

        Pages that take longer to fetch than to compute are not asked for, except for a few now and then, to learn.
        """
        if now_s < self._paused_until_s:
            return 0
        worth = sum(self.page_s < price for price in prices_s)
        if self._probes or (not worth and now_s > self._learned_s + PAUSE_S):
            return min(len(prices_s), PROBE)
        return worth

    def predicted_s(self, pages: int) -> float:
        """Return the predicted seconds of fetching `pages` pages."""
        return pages * self.page_s

    def came(self, pages: int, took_s: float, now_s: float) -> None:
        """Record that a fetch of `pages` pages took `took_s` seconds."""
        late = bool(self.page_s) and took_s > LATE * self.predicted_s(pages) + SLACK_S
        self._learned_s = now_s
        self.expected_s += self.predicted_s(pages) if self.page_s else took_s
        self.took_s += took_s
        each = took_s / max(1, pages)
        self.page_s += (each - self.page_s) * (WEIGHT if self.page_s else 1.0)
        self._judge(now_s, late=late)

    def failed(self, now_s: float) -> None:
        """Record that the tier is away or did not answer in time; this pauses the tier at once."""
        self.misses = MISSES
        self._judge(now_s, late=True)

    def _judge(self, now_s: float, *, late: bool) -> None:
        self.misses = self.misses + 1 if late else 0
        self._probes = self.misses >= MISSES
        if self._probes:
            self._paused_until_s = now_s + PAUSE_S
