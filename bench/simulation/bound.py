"""What no policy can exceed: the tokens that ideal devices could end in time, had they known the whole trace."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from bench.simulation.replay import Arrival, Device


def most_tokens(
    arrivals: Sequence[Arrival], devices: Sequence[Device], *, hop_s: float = 0.0
) -> float:
    """Return a bound of the tokens that end in time, of any policy and any plan made with hindsight.

    All devices together are one fluid that any text may share, be taken from and given back to, served by the earliest
    deadline: for such a resource that order is the best (convex bipartite matching). The fluid is no slower than the
    devices: a text that ends in time lies in a batch that began after its arrival and ended before its deadline, so
    the batch took at most the longest `within_s`, and paid its fixed cost at least once in that time.
    """
    if not arrivals:
        return 0.0
    longest_s = max(arrival.within_s for arrival in arrivals) - hop_s
    if longest_s <= 0:
        return 0.0
    sparse = min(arrival.items / arrival.tokens for arrival in arrivals)
    fluid = [_Fluid(device, longest_s, sparse) for device in devices]
    last_s = max(arrival.at_s + arrival.within_s for arrival in arrivals)
    times = {a.at_s for a in arrivals} | {
        max(a.at_s, a.at_s + a.within_s - hop_s) for a in arrivals
    }
    for device in devices:
        step_s = device.speed.step_s
        times |= {step_s * step for step in range(math.ceil(last_s / step_s) + 1)}
    waiting, coming, total = list[list[float]](), sorted(arrivals, reverse=True), 0.0
    ordered = sorted(times)
    for now_s, next_s in pairwise(ordered):
        while coming and coming[-1].at_s <= now_s:
            arrival = coming.pop()
            heapq.heappush(waiting, [arrival.at_s + arrival.within_s - hop_s, arrival.tokens])
        while waiting and waiting[0][0] < next_s:
            heapq.heappop(waiting)
        room = sum(each.tokens(now_s, next_s) for each in fluid)
        while waiting and room > 0:
            served = min(room, waiting[0][1])
            total, room = total + served, room - served
            waiting[0][1] -= served
            if waiting[0][1] <= 0:
                heapq.heappop(waiting)
    return total


class _Fluid:
    """One device without batches, whose fixed cost is spread over the longest batch that ends in time."""

    def __init__(self, device: Device, longest_s: float, items_a_token: float) -> None:
        self._speed, cost = device.speed, device.cost
        self._fixed = cost.beta_s / longest_s
        self._each_s = cost.alpha_tokens_s + cost.alpha_items_s * items_a_token

    def tokens(self, from_s: float, to_s: float) -> float:
        """Return the tokens between two times within which the device's speed does not change."""
        work_s = self._speed.work(to_s) - self._speed.work(from_s) - self._fixed * (to_s - from_s)
        return 0.0 if work_s <= 0 else math.inf if self._each_s <= 0 else work_s / self._each_s
