"""Steady overload: texts that come for a minute at twice the rate of which the encoders are capable.

What is admitted is done in time, as many texts are done as without overload, and what is refused is refused at once.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen import arrivals, bodies, stats
from loadgen.bodies import Request
from loadgen.load import REFUSED, LoadRun, RequestRun, Sample
from loadgen.target import Target
from tests.guards.checkout import Checkout, Instance

SLO_S = 1.0
TIMES = 2.0  # the rate of the overload, by that of clients who wait for each answer
CLIENTS = 8
# As W3's must; the machine's speed may move meanwhile; a refusal is quick beside the objective.
LATE, GOODPUT, REFUSED_S = 0.01, 0.75, 0.25
SETTINGS = {
    "SPILLWAY_CHAT_MODEL": "none",
    "SPILLWAY_OVERFLOW_WORKERS": "1",
    "SPILLWAY_EMBED_SLO_S": str(SLO_S),
    "SPILLWAY_DTYPE": "auto",
}


class Overload(NamedTuple):
    """What an overload came to: tokens a second in time, by those of the capacity; late ones of those admitted; seconds
    after which 99 % of the refusals came; and answers that are neither a result nor a refusal.
    """

    goodput: float
    late: float
    refused_s: float
    errors: int

    def missed(self) -> list[str]:
        """Return what was not kept."""
        return [
            what
            for what, kept in {
                f"goodput {self.goodput:.2f} of the capacity, not {GOODPUT:g}": self.goodput
                >= GOODPUT,
                f"{100 * self.late:.2f} % late, not {100 * LATE:g} %": self.late <= LATE,
                f"refusals after {self.refused_s:.3f} s, not {REFUSED_S:g} s": self.refused_s
                <= REFUSED_S,
                f"{self.errors} errors": not self.errors,
            }.items()
            if not kept
        ]


def summed_up(samples: Sequence[Sample], seconds: float, capacity: float) -> Overload:
    """Sum up `seconds` of overload; `capacity` in tokens a second. Lateness counts from when a request was due."""
    ok = [sample for sample in samples if sample.ok]
    in_time = [sample for sample in ok if sample.latency_s <= SLO_S]
    refused = [sample.latency_s for sample in samples if sample.status in REFUSED]
    return Overload(
        sum(sample.items for sample in in_time) / seconds / capacity,
        1 - len(in_time) / max(1, len(ok)),
        stats.percentiles(refused or [0.0])["p99"],
        len(samples) - len(ok) - len(refused),
    )


def _request(rng: random.Random) -> Request:
    tokens = rng.randint(20, 250)
    asked = {"input": bodies.text(tokens, rng), "encoding_format": "base64"}
    return Request("/v1/embeddings", msgspec.json.encode(asked), tokens)


async def overloaded(url: str, seconds: float) -> Overload:
    """Measure the capacity by a closed loop before and after the overload, and count by the lower one."""
    rng = random.Random(1)
    asked = [_request(rng) for _ in range(2000)]
    async with Target([url], timeout_s=30) as target:
        load = LoadRun(target, asked)
        await load.closed(CLIENTS, seconds=seconds / 6)
        before = await load.closed(CLIENTS, seconds=seconds / 6)
        rate = TIMES * len(before.samples) / before.seconds
        # The first seconds teach admission how much slower the machine is now.
        await load.open(arrivals.poisson(rate, rng), seconds / 6)
        run = await load.open(arrivals.poisson(rate, rng), seconds)
        after = await load.closed(CLIENTS, seconds=seconds / 6)
    capacity = min(_tokens_per_s(before), _tokens_per_s(after))
    return summed_up(run.samples, run.seconds, capacity)


def _tokens_per_s(run: RequestRun) -> float:
    return sum(sample.items for sample in run.samples if sample.ok) / run.seconds


def run(seconds: float) -> Overload:
    """Start this checkout with encoders on both lanes, and overload them for so many seconds."""
    with tempfile.TemporaryDirectory(prefix="spillway-guard-") as folder:
        instance = Instance(Checkout(), Path(folder), **SETTINGS)
        try:
            return asyncio.run(overloaded(instance.start().url, seconds))
        finally:
            instance.kill()
