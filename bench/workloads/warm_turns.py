"""P2's warm turns: the tiers they come from, and what they are judged by: shares of computing the history, the tail."""

from __future__ import annotations

TIERS = ("device", "host", "redis")
GOALS = {
    "S": {"host": 0.08, "redis": 0.25},
    "M": {"host": 0.03, "redis": 0.06},
    "L": {"host": 0.03, "redis": 0.06},
}
MUSTS = {"host": 0.2, "redis": 0.5}
TAIL = 3.0  # the p99, in medians
