"""Loads that eviction is judged on and was not tuned with: other kinds of use than `kv_traces` generates, other seeds.

Each names the pages of requests in order of time. None has the mix, the lengths or the pauses of the loads that the
default policy's parameters were chosen with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate

from bench.simulation.kv_traces import TraceTurn, generate, name
from common.pages.identity import PageId

FRESH = 1000  # seeds below were free for choosing parameters


def unseen(requests: int, seed: int) -> dict[str, list[TraceTurn]]:
    """Return every load by name, of so many requests each; `seed` is added to the first fresh one."""
    draws: dict[str, Callable[[int, random.Random], list[TraceTurn]]] = {
        "agents": _agents,
        "visited documents": _visits,
        "changing fashions": _fashions,
        "scans beside chat": _scans,
    }
    found = {
        kind: draw(requests, random.Random(f"{FRESH + seed} {kind}"))
        for kind, draw in draws.items()
    }
    for skew in (0.6, 0.9, 1.2, math.inf):
        kind = "conversations" if math.isinf(skew) else f"skew {skew:g}"
        found[kind] = generate(requests, skew, FRESH + seed)
    return found


def _cut(found: list[TraceTurn], requests: int) -> list[TraceTurn]:
    return sorted(found, key=lambda request: request.at_s)[:requests]


def _pages(*parts: str | int, count: int) -> list[PageId]:
    return [name(*parts, place) for place in range(count)]


def _agents(requests: int, draw: random.Random) -> list[TraceTurn]:
    """Return agents' steps: long common instructions, then a task of quick steps whose tools answer at length.

    Eight agents with 20 to 120 pages of instructions, asked for with the power 1 of their rank; a task every 15 s, of
    3 to 40 steps, 1 to 20 s apart, each with up to 12 pages of a tool's output and at most two of the model's.
    """
    instructions = [_pages("agent", each, count=draw.randrange(20, 121)) for each in range(8)]
    weights = [1 / (rank + 1) for rank in range(len(instructions))]
    found: list[TraceTurn] = []
    at_s, task = 0.0, 0
    while len(found) < 2 * requests:
        (chain,) = draw.choices(instructions, weights)
        chain, now_s = list(chain), at_s
        for step in range(draw.randrange(3, 41)):
            chain = [*chain, *_pages("tool", task, step, count=draw.randrange(1, 13))]
            answer = _pages("call", task, step, count=draw.randrange(3))
            found.append(TraceTurn(now_s, list(chain), answer))
            chain += answer
            now_s += draw.uniform(1.0, 20.0)
        at_s, task = at_s + draw.expovariate(1 / 15.0), task + 1
    return _cut(found, requests)


def _visits(requests: int, draw: random.Random) -> list[TraceTurn]:
    """Return questions about documents that come, are asked about for a while, and are never seen again.

    A document of 8 to 128 pages every 2 s. Six of ten get one question, the others 2 to 15, at random over a life of
    one to thirty minutes. Answers do not tell which is which.
    """
    found: list[TraceTurn] = []
    for number, at_s in zip(range(requests), _times(draw, 0.5), strict=False):
        pages = _pages("file", number, count=draw.randrange(8, 129))
        count = 1 if draw.random() < 0.6 else draw.randrange(2, 16)
        life_s = 60.0 * 30 ** draw.random()
        moments = [at_s, *(at_s + draw.uniform(0.0, life_s) for _ in range(count - 1))]
        for asked, moment_s in enumerate(sorted(moments)):
            question = _pages("about", number, asked, count=draw.randrange(1, 3))
            answer = _pages("said", number, asked, count=draw.randrange(7))
            found.append(TraceTurn(moment_s, [*pages, *question], answer))
    return _cut(found, requests)


def _fashions(requests: int, draw: random.Random) -> list[TraceTurn]:
    """Return questions about documents whose popularity changes: every ten minutes another order of ranks.

    600 documents of 2 to 64 pages, two questions a second, popularity with the power 1.1 of the rank.
    """
    lengths = [draw.randrange(2, 65) for _ in range(600)]
    weights = list(accumulate((rank + 1) ** -1.1 for rank in range(len(lengths))))
    order, found = list(range(len(lengths))), list[TraceTurn]()
    changed_s = 0.0
    for number, at_s in zip(range(requests), _times(draw, 2.0), strict=False):
        if at_s >= changed_s:
            draw.shuffle(order)
            changed_s += 600.0
        (document,) = draw.choices(order, cum_weights=weights)
        pages = _pages("page", document, count=lengths[document])
        answer = _pages("told", number, count=draw.randrange(4))
        found.append(TraceTurn(at_s, [*pages, name("query", number)], answer))
    return found


def _scans(requests: int, draw: random.Random) -> list[TraceTurn]:
    """Return chat under three system prompts of 30 pages, and every two minutes a batch of documents read once.

    Two of three requests are chat: 1 to 30 turns, half a minute apart. A batch has as many documents of 10 to 200
    pages as the third part needs, four a second.
    """
    found: list[TraceTurn] = []
    at_s, talk = 0.0, 0
    while len(found) < requests * 2 // 3:
        chain = _pages("system", draw.randrange(3), count=30)
        now_s = at_s
        for turn in range(min(30, math.ceil(draw.expovariate(1 / 6)))):
            chain = [*chain, *_pages("user", talk, turn, count=draw.randrange(1, 4))]
            answer = _pages("reply to", talk, turn, count=draw.randrange(1, 9))
            found.append(TraceTurn(now_s, list(chain), answer))
            chain += answer
            now_s += 1.0 + draw.expovariate(1 / 30.0)
        at_s, talk = at_s + draw.expovariate(1 / 6.0), talk + 1
    for number in range(requests - len(found)):
        batch, place = divmod(number, 120)
        pages = _pages("scanned", number, count=draw.randrange(10, 201))
        summary = _pages("summary", number, count=draw.randrange(2))
        found.append(TraceTurn(120.0 * (batch + 1) + place / 4, pages, summary))
    return _cut(found, requests)


def _times(draw: random.Random, rate: float) -> Iterator[float]:
    """Yield moments at random, `rate` a second."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s
