"""Simulate one tier under one rule: the share of a trace's pages that are held when they are asked for."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.simulation.kv_traces import TraceTurn
from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import Policy, make_policy

FALL = 1e-6
Rank = tuple[float, ...]


def price(depth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every page costs the same, but for a millionth a position.

    A page counts only with all before it, so of two the one behind is the lesser loss.
    """
    return 1 - FALL * np.minimum(depth, 0.5 / FALL)


def hit_rate(name: str, requests: Sequence[TraceTurn], capacity: int) -> float:
    """Return the share of pages that are hits: held, with all before them, when their request arrives.

    Then all its pages are touched or added in order, and after each the policy drops what is above `capacity`, be
    it of this request.
    """
    history = History()
    policy = make_policy(name, history, price)
    # The queues take one page after the other, as those the rule was written for; the others see the whole turn.
    whole = name in ("pensieve", "spillway")
    held: set[PageId] = set()
    hits = total = 0
    for request in requests:
        total += len(request.pages)
        hits += _prefix(request.pages, held)
        if whole:
            history.begin(request.pages, request.at_s)
            history.end([*request.pages, *request.answer], request.at_s)
        for page in request.pages:
            if page not in held:
                held.add(page)
                policy.add(page)
            elif not whole:
                policy.used([page])
            _shrink(policy, held, capacity, request.at_s)
    return hits / total


def _prefix(pages: Sequence[PageId], held: Container[PageId]) -> int:
    return next((n for n, page in enumerate(pages) if page not in held), len(pages))


def _shrink(policy: Policy, held: set[PageId], capacity: int, now_s: float) -> None:
    while len(held) > capacity:
        for page in policy.victims(1, now_s):
            policy.discard(page)
            held.remove(page)


def clairvoyant(requests: Sequence[TraceTurn], capacity: int) -> float:
    """Return the hit rate of dropping the page whose next use is farthest away."""
    return _foreseen(
        requests, capacity, lambda _now, _place, uses: (-uses[0] if uses else -math.inf,)
    )


def informed(requests: Sequence[TraceTurn], capacity: int) -> float:
    """Return the hit rate of dropping the page that will be used the fewest times; among equals by age, from behind.

    It knows how often, not when: what the best learner of rates could come to know.
    """
    return _foreseen(requests, capacity, lambda now, place, uses: (len(uses), now, -place))


def _foreseen(
    requests: Sequence[TraceTurn], capacity: int, rank: Callable[[int, int, deque[int]], Rank]
) -> float:
    """Return the hit rate of dropping the page of the lowest rank: by now, place and uses still to come."""
    future: defaultdict[PageId, deque[int]] = defaultdict(deque)
    for now, request in enumerate(requests):
        for page in request.pages:
            future[page].append(now)
    held: dict[PageId, Rank] = {}
    order: list[tuple[Rank, PageId]] = []
    hits = total = 0
    for now, request in enumerate(requests):
        total += len(request.pages)
        hits += _prefix(request.pages, held)
        for place, page in enumerate(request.pages):
            uses = future[page]
            while uses and uses[0] <= now:
                uses.popleft()
            held[page] = rank(now, place, uses)
            heapq.heappush(order, (held[page], page))
            while len(held) > capacity:
                lowest, victim = heapq.heappop(order)
                if held.get(victim) == lowest:
                    del held[victim]
    return hits / total
