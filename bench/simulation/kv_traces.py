"""Traces of pages: the pages that requests of a load name, read from a file or generated."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.pages.identity import PAGE, PageId

# ShareGPT as the paper has it: 5.56 turns in the mean, 36 % of the conversations at least 5; tokens in and out.
TURNS_MU, TURNS_SIGMA, MOST_TURNS = 0.981, 1.131, 200
TOKENS_IN, TOKENS_OUT = 37.77, 204.58
THINK_S = 60.0


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn: when it comes, the pages of its prompt, and those of its answer that are full."""

    at_s: float
    pages: list[PageId]
    answer: list[PageId]


class _Line(msgspec.Struct):
    timestamp: float  # milliseconds
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> list[TraceTurn]:
    """Read a trace as Mooncake publishes them: JSON lines with timestamp, output_length and hash_ids.

    A block of the file is a page here. Answers are not named in it: each gets a name for every full PAGE tokens.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path}, line {number}: {error}; expected a JSON object with timestamp, output_length, hash_ids"
            ) from error
        pages = [name("block", block) for block in found.hash_ids]
        answer = [name("answer", number, place) for place in range(found.output_length // PAGE)]
        requests.append(TraceTurn(found.timestamp / 1000, pages, answer))
    return requests


def name(*parts: str | int) -> PageId:
    """Return a page's id, made of what it is of."""
    return "/".join(map(str, parts)).encode()


def turns(draw: random.Random) -> int:
    """Return how many turns a conversation has."""
    return min(MOST_TURNS, math.ceil(draw.lognormvariate(TURNS_MU, TURNS_SIGMA)))


def tokens(draw: random.Random) -> tuple[int, int]:
    """Return the tokens of one turn, in and out."""
    return (
        max(1, int(draw.expovariate(1 / TOKENS_IN))),
        max(1, int(draw.expovariate(1 / TOKENS_OUT))),
    )


def generate(requests: int, skew: float, seed: int) -> list[TraceTurn]:
    """Return a load of conversations like ShareGPT's and of questions about documents, half of each.

    The documents' popularity falls with the power `skew` of their rank; an infinite one means conversations only.
    """
    draw = random.Random(seed)
    found: list[TraceTurn] = []
    asked = 0 if math.isinf(skew) else requests // 2
    if asked:
        found += _questions(asked, skew, draw)
    rate = (requests - asked) / max(1, asked) if asked else 1.0
    found += _conversations(requests - asked, rate, draw)
    return sorted(found, key=lambda request: request.at_s)[:requests]


def _questions(count: int, skew: float, draw: random.Random) -> list[TraceTurn]:
    """Questions come once a second; each about a document of 4 to 256 pages, and a page of its own."""
    lengths = [round(2 ** draw.uniform(2, 8)) for _ in range(2000)]
    weights = [(rank + 1) ** -skew for rank in range(len(lengths))]
    order = draw.choices(range(len(lengths)), weights, k=count)
    found, at_s = [], 0.0
    for number, document in enumerate(order):
        at_s += draw.expovariate(1.0)
        pages = [name("document", document, place) for place in range(lengths[document])]
        answer = [name("reply", number, n) for n in range(draw.randrange(3))]
        found.append(TraceTurn(at_s, [*pages, name("question", number)], answer))
    return found


def _conversations(count: int, rate: float, draw: random.Random) -> list[TraceTurn]:
    """Return the turns of conversations, `rate` of them a second."""
    found: list[TraceTurn] = []
    at_s, number = 0.0, 0
    waiting: list[tuple[float, int, int, int]] = []  # time, conversation, turns left, tokens so far
    while len(found) < count:
        if not waiting or waiting[0][0] > at_s:
            heapq.heappush(waiting, (at_s, number, turns(draw), 0))
            number += 1
            at_s += draw.expovariate(rate / 5.56)
        now_s, who, left, before = heapq.heappop(waiting)
        come, gone = tokens(draw)
        prompt, whole = (before + come) // PAGE, (before + come + gone) // PAGE
        pages = [name("turn", who, place) for place in range(whole)]
        if prompt:
            found.append(TraceTurn(now_s, pages[:prompt], pages[prompt:]))
        if left > 1:
            again_s = now_s + gone * 0.03 + draw.expovariate(1 / THINK_S)
            heapq.heappush(waiting, (again_s, who, left - 1, before + come + gone))
    return found
