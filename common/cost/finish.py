"""The predicted end of a job on a lane, as a pure function; the script `admit` computes the same in Lua.

WindVE counts depths in queries; this model counts the work ahead. A lane is a queue in order of arrival, executed in
planned batches: a job joins the last planned batch if that batch still ends in time for all its jobs, else the job
begins the next batch. So a later job never makes an earlier job miss its promised time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from common.cost.linear import LinearCost

LEAST = 0.05  # of the objective: the least margin, also of a job predicted to end soon


class Tail(NamedTuple):
    """The last planned batch of a lane: its number, its size, and its earliest due time in seconds from now.

    `began` is the latest batch known to have begun when this batch was planned, also on workers that have gone since.
    """

    number: int = 0
    items: int = 0
    tokens: int = 0
    due_s: float = math.inf
    began: int = 0


class Queue(NamedTuple):
    """A lane as admission sees it: `workers` workers of one mean `cost`, with batches of at most `limit_*`.

    `held_*` counts all queued and running work, `running_*` the work in running batches, which need `remaining_s` more
    seconds, summed over the workers; `began` is the highest number of these batches. `hop_s` is the time from the end
    of a job to its client. A prediction may be late by `late_s` seconds, and by `least_s` + `late_share` * prediction,
    whichever is less.
    """

    cost: LinearCost
    workers: int
    held_items: int = 0
    held_tokens: int = 0
    running_items: int = 0
    running_tokens: int = 0
    remaining_s: float = 0.0
    began: int = 0
    limit_items: int = 256
    limit_tokens: int = 8192
    hop_s: float = 0.0
    late_s: float = 0.0
    late_share: float = 0.0
    least_s: float = 0.0

    def batches(self, items: int, tokens: int) -> int:
        """Return the least number of batches for this work."""
        return max(math.ceil(items / self.limit_items), math.ceil(tokens / self.limit_tokens))

    def safe(self, finish_s: float) -> float:
        """Return when the client surely has the result of a job predicted to end in `finish_s`."""
        return finish_s + self.hop_s + margin(finish_s, self.late_s, self.late_share, self.least_s)


class PlannedPlace(NamedTuple):
    """A job's place on a lane: its planned batch, ending in `finish_s`, and the lane's tail after its admission."""

    number: int
    finish_s: float
    tail: Tail


def margin(finish_s: float, late_s: float, late_share: float, least_s: float) -> float:
    """Return the margin of a prediction: the lesser of `late_s` and `least_s` + `late_share` * `finish_s`."""
    return min(late_s, least_s + late_share * finish_s)


def remaining(left_s: float, needs_s: float) -> float:
    """Return the remaining seconds of a batch that was predicted to take `needs_s` in all and to end in `left_s`.

    A late batch (`left_s` below 0) is expected to need as long again as it is late, but at most `needs_s`.
    """
    return left_s if left_s >= 0 else min(-left_s, needs_s)


def place(queue: Queue, tail: Tail, items: int, tokens: int, due_s: float) -> PlannedPlace:
    """Return the planned batch of a job of this size, due in `due_s`, and the job's end.

    The caller decides by `queue.safe` whether that is early enough.
    """
    cost, n, began = queue.cost, max(1, queue.workers), max(queue.began, tail.began)
    ahead_items = max(0, queue.held_items - queue.running_items)
    ahead_tokens = max(0, queue.held_tokens - queue.running_tokens)
    fits_in = ahead_items >= tail.items and ahead_tokens >= tail.tokens
    waits = tail.items > 0 and tail.number > began and fits_in
    if waits:
        ahead_items, ahead_tokens = ahead_items - tail.items, ahead_tokens - tail.tokens
        between = min(tail.number - began - 1, ahead_items)
    else:
        between = queue.batches(ahead_items, ahead_tokens)
    ahead_s = cost.alpha_items_s * ahead_items + cost.alpha_tokens_s * ahead_tokens
    start_s = (queue.remaining_s + ahead_s + cost.beta_s * between) / n
    if waits:
        items_then, tokens_then = tail.items + items, tail.tokens + tokens
        finish_s, first_s = start_s + cost.seconds(items_then, tokens_then), min(tail.due_s, due_s)
        fits = items_then <= queue.limit_items and tokens_then <= queue.limit_tokens
        if fits and queue.safe(finish_s) <= first_s:
            joined = Tail(tail.number, items_then, tokens_then, first_s, began)
            return PlannedPlace(tail.number, finish_s, joined)
        start_s += cost.seconds(tail.items, tail.tokens) / n
    number = max(tail.number, began) + 1
    finish_s = start_s + cost.seconds(items, tokens)
    finish_s += cost.beta_s * (queue.batches(items, tokens) - 1)
    return PlannedPlace(number, finish_s, Tail(number, items, tokens, due_s, began))
