"""Goals of a deployment, prices, and the schedule that reaches them at the least cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from planner.schedule_search import RagSchedule


class Goals(NamedTuple):
    """What a deployment shall give: at most so many seconds to the first token and between tokens, requests/s."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    qps: float = 0.0

    def shortfalls(self, schedule: RagSchedule) -> dict[str, float]:
        """Return by what factor a schedule misses each goal that it does not reach."""
        found = {
            "ttft": schedule.ttft_s / self.ttft_s,
            "tpot": schedule.tpot_s / self.tpot_s,
            "qps": self.qps / schedule.qps,
        }
        return {name: factor for name, factor in found.items() if factor > 1}


class Prices(NamedTuple):
    """What a chip and a host cost an hour."""

    chip: float = 1.0
    host: float = 0.0

    def of(self, schedule: RagSchedule) -> float:
        """Return what a schedule costs an hour."""
        return self.chip * schedule.chips + self.host * schedule.hosts


class Choice(NamedTuple):
    """The schedule that was chosen, and by what factor it misses each goal that it does not reach."""

    schedule: RagSchedule
    shortfalls: dict[str, float]


def choose(schedules: Iterable[RagSchedule], goals: Goals, prices: Prices) -> Choice | None:
    """Return the cheapest schedule that reaches all goals, of equally cheap ones that with the earliest first token.

    Without a goal for requests/s, the one with the most for its price. Where none reaches all, the one whose worst goal
    is missed by the least factor. None if there is no schedule at all.
    """

    def order(schedule: RagSchedule) -> tuple[float, ...]:
        missed = max(goals.shortfalls(schedule).values(), default=1.0)
        cost = prices.of(schedule) if goals.qps else prices.of(schedule) / schedule.qps
        return missed, cost, schedule.ttft_s, -schedule.qps, schedule.tpot_s, schedule.hosts

    best = min(schedules, key=order, default=None)
    return None if best is None else Choice(best, goals.shortfalls(best))


def within(schedules: Iterable[RagSchedule], goals: Goals) -> Iterator[RagSchedule]:
    """Yield the schedules whose later tokens come as fast as asked: the front is drawn of these."""
    return (each for each in schedules if each.tpot_s <= goals.tpot_s)
