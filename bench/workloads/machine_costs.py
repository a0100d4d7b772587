"""Times of this machine's processes under grounded chats, as the simulation of a deployment needs them."""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from spillway_client import AsyncSpillway

from bench.mesh import proc
from bench.workloads.grounded_load import ANSWER_TOKENS, asking, questions
from cli.deployment_check import fetch_mesh
from cli.http import Endpoint
from cli.instance import Instance
from cli.profile import StartedInstance
from loadgen import bodies
from loadgen.chat.client import Chat
from loadgen.chat.load import ChatLoad
from loadgen.chat.replies import Reply
from loadgen.target import Target
from planner.load_simulation import LineCost, RagLoad, StepSeconds
from planner.machine_candidates import MachineCosts, WorkerCosts

ROWS, TOKENS = (
    (1, 2, 4, 8),
    24,
)  # sequences generated at once, and tokens of each, to measure a step
SHORT, LONG = 16, 128  # words of two prompts, by which a token's reading is measured
QUESTION_TOKENS = 10


class Reps(NamedTuple):
    """How often each is measured: prompts, streams, and questions asked one after another."""

    prompts: int
    streams: int
    questions: int


FULL, QUICK = Reps(15, 3, 40), Reps(2, 1, 4)


class MachineCalibration(NamedTuple):
    """The costs of a machine whose workers have so many threads, and what a question asks of it on average.

    `ttft_s` is the median time to the first token of a question on the idle mesh.
    """

    threads: int
    worker: WorkerCosts
    search: LineCost
    request_s: float
    token_s: float
    hop_s: float
    load: RagLoad
    ttft_s: float


def joined(calibrations: Sequence[MachineCalibration]) -> tuple[MachineCosts, RagLoad]:
    """Return the costs of the machine with all threads that were measured; what is around the workers on average."""

    def mean(name: str) -> float:
        return float(statistics.mean(getattr(each, name) for each in calibrations))

    first = calibrations[0]
    costs = MachineCosts(
        {each.threads: each.worker for each in calibrations},
        first.search,
        mean("request_s"),
        mean("token_s"),
        mean("hop_s"),
    )
    return costs, first.load


async def calibrate(instance: StartedInstance, threads: int, reps: Reps) -> MachineCalibration:
    """Measure a mesh of one worker, idle but for this, that holds the collection."""
    async with AsyncSpillway(instance.url, timeout_s=120) as client:
        step = await _step(client, reps)
    many = await _asked(instance, reps.questions, ANSWER_TOKENS)
    one = await _asked(instance, reps.questions, 1)
    token_s = max((many.cpu_s - one.cpu_s) / (ANSWER_TOKENS - 1), 0.0)
    request_s = max(one.cpu_s - token_s, 0.0)
    embed, search = _registered(fetch_mesh(Endpoint(instance.url, None)))
    prompt = round(
        statistics.median(each.prompt_tokens - each.cached_tokens for each in many.replies)
    )
    ttft_s = statistics.median(each.ttft_s or 0.0 for each in many.replies)
    known = embed.seconds(1) + search.seconds(1) + step.seconds(prompt, 1) + request_s + token_s
    return MachineCalibration(
        threads,
        WorkerCosts(embed, step),
        search,
        request_s,
        token_s,
        max(ttft_s - known, 0.0),
        RagLoad(prompt, ANSWER_TOKENS),
        ttft_s,
    )


# -- a step of generation ---------------------------------------------------------------------------


async def _step(client: AsyncSpillway, reps: Reps) -> StepSeconds:
    """Return a step's seconds: of a token by two lengths of a prompt, the rest by sequences generated at once."""
    draw = random.Random(5)

    def text(words: int) -> str:
        return " ".join(draw.choices(bodies.WORDS, k=words))

    async def read(words: int) -> tuple[float, float]:
        began = time.monotonic()
        answer = await client.completions.create(text(words), max_tokens=1, temperature=0.0)
        tokens = answer.usage.prompt_tokens if answer.usage is not None else 0
        return time.monotonic() - began, tokens

    async def write() -> float:
        stream = await client.completions.stream(
            text(4), max_tokens=TOKENS, min_tokens=TOKENS, temperature=1.0
        )
        moments = [time.monotonic() async for _ in stream]
        return (moments[-1] - moments[0]) / (TOKENS - 1)

    async def rows(count: int) -> float:
        return statistics.mean(await asyncio.gather(*(write() for _ in range(count))))

    short = await _median(lambda: read(SHORT), reps.prompts)
    long = await _median(lambda: read(LONG), reps.prompts)
    token_s = (long[0] - short[0]) / (long[1] - short[1])
    points = [
        (count, statistics.median([await rows(count) for _ in range(reps.streams)]))
        for count in ROWS
    ]
    base_s, row_s = fitted(points)
    return StepSeconds(base_s, token_s, row_s)


async def _median(
    measure: Callable[[], Awaitable[tuple[float, float]]], times: int
) -> tuple[float, float]:
    await measure()  # what is made at first use
    found = [await measure() for _ in range(times)]
    return statistics.median(s for s, _ in found), statistics.median(n for _, n in found)


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the line of least squares through points as (its value at 0, its slope), neither below 0."""
    x, y = [each[0] for each in points], [each[1] for each in points]
    slope, base = statistics.linear_regression(x, y)
    if slope < 0:
        return statistics.mean(y), 0.0
    return (base, slope) if base >= 0 else (0.0, sum(y) / sum(x))


# -- questions one after another --------------------------------------------------------------------


class _Asked(NamedTuple):
    """Questions that were asked one after another, and the CPU seconds of each outside of the workers."""

    replies: list[Reply]
    cpu_s: float


async def _asked(instance: StartedInstance, count: int, tokens: int) -> _Asked:
    async with Chat([instance.url]) as chat, Target([instance.url]) as target:
        load = ChatLoad(chat, target, questions(tokens, tokens), asking())
        await load.closed(1, count=3)
        load = ChatLoad(chat, target, questions(100 + tokens, tokens), asking())
        before = _cpu_s(instance)
        talk = await load.closed(1, count=count)
        spent = _cpu_s(instance) - before
    failed = [each for each in talk.replies if not each.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} questions failed: {failed[0].code}")
    return _Asked(talk.replies, spent / count)


def _cpu_s(instance: StartedInstance) -> float:
    """Return the CPU seconds of the router, of Redis and of this process so far."""
    notes = Instance.at(instance.data_dir).notes()
    around = [note["pid"] for note in notes.values() if note.get("service") in _AROUND]
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(map(proc.tree_cpu_seconds, around))


_AROUND = frozenset({"router", "redis", "redis-pages", "kv_store"})


def _registered(mesh: dict[str, Any]) -> tuple[LineCost, LineCost]:
    """Return what the workers' own records say of a question's embedding, and of a search."""
    costs = {each["kind"]: each["cost"] for each in mesh["workers"] if each["state"] == "ready"}
    embed, search = costs["embed"], costs["search"]
    each = embed["alpha_items_s"] + QUESTION_TOKENS * embed["alpha_tokens_s"]
    return LineCost(embed["beta_s"], each), LineCost(search["beta_s"], search["alpha_items_s"])
