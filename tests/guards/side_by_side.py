"""Two checkouts that run at the same time and get the same load in turns, so that a slow minute slows both."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.document import BenchOptions
from bench.rivals.completion_servers import Weights, weights
from bench.simulation.unified import DEVICE_TOKENS, SCALE
from bench.suites.c1 import GOAL, TALK
from bench.workloads.conversations import conversations, under_way
from bench.workloads.turns import System, TurnLoad, ninetieth
from loadgen import arrivals
from loadgen.chat.client import Chat
from loadgen.chat.load import Asking, ChatLoad
from loadgen.chat.scripts import scripts
from loadgen.target import Target
from tests.guards.checkout import Checkout, Instance
from tests.guards.pairs import Costs, ratio

# Half of the rate at which latency grows without bound: near that rate, a figure says how busy the machine is.
CONVERSATIONS_PER_S = 2.5
CHATS_PER_S = 1.0
HOST_TIMES = 4
WARM = 0.3


@dataclass(frozen=True)
class Load:
    """A load on one instance: the instance's settings, and a function of url, seed and seconds that returns costs."""

    settings: Mapping[str, str]
    costs: Callable[[str, int, float], Coroutine[Any, Any, Costs]]


def p1() -> Load:
    """Return conversations of several turns that send their whole history, on S with every tier of pages."""
    found = weights("S", SCALE.context, DEVICE_TOKENS, HOST_TIMES, BenchOptions())
    settings = {
        "SPILLWAY_CHAT_MODEL": str(found.directory),
        "SPILLWAY_CHAT_DTYPE": "bf16",
        "SPILLWAY_KV_BYTES": str(found.kv_bytes),
        "SPILLWAY_HOST_KV_BYTES": str(found.host_bytes),
        "SPILLWAY_PAGE_PUBLISH": "selective",
    }

    async def costs(url: str, seed: int, seconds: float) -> Costs:
        return await _histories(url, found, seed, seconds)

    return Load(settings, costs)


async def _histories(url: str, found: Weights, seed: int, seconds: float) -> Costs:
    """Return the median and the 90th percentile of the latency by output token."""
    system = System(url, found.vocabulary, more={"ignore_eos": True})
    begun = under_way(SCALE, found.vocabulary, seed, CONVERSATIONS_PER_S)
    load = TurnLoad(system, conversations(SCALE, found.vocabulary, seed), seed, begun)
    asked = await load.run(CONVERSATIONS_PER_S, seconds)
    if failed := {turn.code for turn in asked if turn.code}:
        raise RuntimeError(f"{url}: turns failed: {sorted(failed)[:3]}")
    counted = [turn for turn in asked if turn.due_s >= WARM * seconds and turn.done_s is not None]
    values = sorted(turn.normalized_s(seconds) for turn in counted)
    return {"median": statistics.median(values), "p90": ninetieth(values)}


def c1() -> Load:
    """Return conversations by session, on the shipped model."""
    return Load({"SPILLWAY_CHAT_DTYPE": "fp32"}, _sessions)


async def _sessions(url: str, seed: int, seconds: float) -> Costs:
    """Return the median time to the first token and the median seconds a token after it."""
    async with Chat([url]) as chat, Target([url]) as target:
        load = ChatLoad(chat, target, scripts(TALK, seed), Asking("session"))
        talk = await load.open(arrivals.poisson(CHATS_PER_S, random.Random(seed)), seconds)
    found = talk.summary(GOAL)
    if not found["ok"] or found["ok"] < found["requests"]:
        raise RuntimeError(f"{url}: {found['ok']} answers, {found['codes'] or 'no request ended'}")
    return {"first token": found["ttft_s"]["p50"], "a token": found["tpot_s"]["p50"]}


LOADS = {"P1": p1, "C1": c1}


def compare(
    name: str, ours: Checkout, theirs: Checkout, count: int, *, seconds: float
) -> Iterator[float]:
    """Start both checkouts, then load one and the other in turns; yield each pair's ratio, 1 is equal.

    The first pair warms both up and is not yielded.
    """
    load = LOADS[name]()
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_running(each, load.settings)) for each in (ours, theirs)]
        for number in range(count + 1):
            found = dict[str, Costs]()
            for side in sides if number % 2 == 0 else sides[::-1]:
                found[side.url] = asyncio.run(load.costs(side.url, number, seconds))
            if number:
                yield ratio(*(found[side.url] for side in sides))


@contextlib.contextmanager
def _running(checkout: Checkout, settings: Mapping[str, str]) -> Iterator[Instance]:
    with tempfile.TemporaryDirectory(prefix="spillway-guard-") as folder:
        instance = Instance(checkout, Path(folder), **settings)
        try:
            yield instance.start()
        finally:
            instance.kill()
