"""T1: one generated token over HTTP, taken apart: the device's step, the time between steps, and every thread."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import aiohttp
import msgspec

from bench.document import BenchOptions, Body
from bench.mesh import probe
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.threads import ThreadTimes, read_threads, summed
from bench.rivals import completion_servers as servers
from bench.rivals.completion_servers import Weights
from bench.suites import n2
from bench.workloads.streamed_batch import prompts, tokens_in

MODEL, KIND = "M", "bf16"
PROMPT, NEW_TOKENS, SPARE = 128, 512, 32
STREAMS = (1, 8)
ROUNDS = 20
FIRST, LAST = 64, 448  # tokens of the first stream between which everything is counted
DEVICE_TOKENS = 32_768
WORKER, CLIENT = "gpu_worker", "client"
COMPUTE = 2  # threads of the worker that compute: the device's own and the kernels' helper
BUSY, IDLE = (
    'spillway_device_busy_seconds_total{kind="generate"}',
    "spillway_device_idle_seconds_total",
)

COUNTED = (
    f"{MODEL} in {KIND}, prompts of {PROMPT} random tokens, {NEW_TOKENS} new ones; the median of the rounds. All is "
    f"counted while one client reads tokens {FIRST} to {LAST} of the first stream: by the client's clock, the device "
    "thread's counters of busy and idle seconds, and the kernel's counters of every thread."
)
READING = (
    "The step and the time between steps are wall time and add up to the token; the CPU of the threads lies beneath "
    "and beside them. A switch is a thread that went to sleep by itself; in the run queue a thread waits for a core."
)


class Snapshot(NamedTuple):
    """All counters at one moment: seconds, tokens the client has read, the device's seconds, threads by process."""

    at_s: float
    tokens: int
    busy_s: float
    idle_s: float
    threads: dict[str, dict[int, ThreadTimes]]


@dataclass(slots=True)
class TokenParts:
    """What one token took in one round, in microseconds; threads by role."""

    token_us: float
    step_us: float
    between_us: float
    threads: dict[str, ThreadTimes] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        """Return the share of the token's time that the step and the time between steps add up to."""
        return (self.step_us + self.between_us) / self.token_us


def parts_of(before: Snapshot, after: Snapshot, main: int, streams: int) -> TokenParts:
    """Return what a token of one stream took between two snapshots.

    `main` is the worker's process id, which is also the id of the thread of its event loop. With several streams the
    client's times are those between two tokens of one stream; CPU is that of one token of one of them.
    """
    tokens = after.tokens - before.tokens
    steps = tokens / streams
    found = TokenParts(
        token_us=1e6 * (after.at_s - before.at_s) / steps,
        step_us=1e6 * (after.busy_s - before.busy_s) / steps,
        between_us=1e6 * (after.idle_s - before.idle_s) / steps,
    )
    nothing = ThreadTimes(0, 0, 0)
    for name, threads in after.threads.items():
        earlier = before.threads.get(name, {})
        used = {tid: total.since(earlier.get(tid, nothing)) for tid, total in threads.items()}
        if name == WORKER:
            loop = used.pop(main, nothing)
            rest = sorted(used.values(), key=lambda each: -each.cpu_us)
            roles = {"worker's event loop": [loop]}
            roles |= {
                f"compute thread {number + 1}": [each] for number, each in enumerate(rest[:COMPUTE])
            }
            roles["worker's other threads"] = rest[COMPUTE:]
        else:
            roles = {name: list(used.values())}
        for role, some in roles.items():
            total = summed(some)
            found.threads[role] = ThreadTimes(*(value / tokens for value in total))
    return found


def run(options: BenchOptions) -> Body:
    """Measure one stream and eight of M, then the same steps in process (quick: two rounds of each)."""
    body = Body()
    context = PROMPT + NEW_TOKENS + SPARE
    found = servers.weights(MODEL, context, DEVICE_TOKENS, 1, options)
    for streams in STREAMS:
        rounds = asyncio.run(_rounds(found, streams, options))
        body.samples[f"{streams}"] = msgspec.to_builtins(rounds)
        _describe(body, streams, rounds)
    _in_process(body, found, options)
    body.notes += [COUNTED, READING]
    return body


async def _rounds(found: Weights, streams: int, options: BenchOptions) -> list[TokenParts]:
    rounds = list[TokenParts]()
    async with servers.local_mesh(found, {}, kind=KIND, sessions=False) as mesh:
        for number in range(-1, options.rounds(ROUNDS, 2)):
            parts = await _round(mesh, found, streams, f"{options.seed} {streams} {number}")
            if number >= 0:
                rounds.append(parts)
    return rounds


async def _round(mesh: LocalMesh, found: Weights, streams: int, seed: str) -> TokenParts:
    asked = prompts(streams, PROMPT, found.vocabulary, seed)
    counts, snapshots = [0] * streams, list[Snapshot]()

    async def read(http: aiohttp.ClientSession, place: int) -> None:
        body = {
            "prompt": asked[place], "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "ignore_eos": True,
            "temperature": 0.0, "stream": True,
        }  # fmt: skip
        async with http.post(f"{mesh.url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    counts[place] += len(tokens_in(line[6:].strip()))
                    limit = (FIRST, LAST)[len(snapshots)] if len(snapshots) < 2 else NEW_TOKENS + 1
                    if place == 0 and counts[0] >= limit:
                        snapshots.append(await _snapshot(mesh, counts))

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(read(http, place) for place in range(streams)))
    before, after = snapshots
    return parts_of(before, after, mesh.pid(WORKER), streams)


async def _snapshot(mesh: LocalMesh, counts: list[int]) -> Snapshot:
    threads = {name: read_threads(mesh.pid(name)) for name in mesh.names()}
    threads[CLIENT] = read_threads(os.getpid())
    at_s, tokens = time.perf_counter(), sum(counts)
    port = mesh.health_port(WORKER)
    shown = await probe.metrics(port) if port is not None else {}
    return Snapshot(at_s, tokens, shown[BUSY], shown[IDLE], threads)


def _describe(body: Body, streams: int, rounds: list[TokenParts]) -> None:
    def middle(values: Sequence[float]) -> str:
        return f"{median(values):,.0f}"

    whole = median(one.whole for one in rounds)
    what = "one stream" if streams == 1 else f"{streams} streams"
    body.table(
        f"Wall time between two tokens of a stream, {what}",
        ["part", "us"],
        [
            ["at the client", middle([one.token_us for one in rounds])],
            ["the device's step", middle([one.step_us for one in rounds])],
            ["between two steps", middle([one.between_us for one in rounds])],
            ["both, of the client's", f"{whole:.1%}"],
        ],
    )
    rows = []
    for role in rounds[0].threads:
        cpu, queued, switches = zip(*(one.threads[role] for one in rounds), strict=True)
        rows.append([role, middle(cpu), middle(queued), f"{median(switches):.2f}"])
    columns = ["threads", "CPU us a token", "in the run queue us a token", "switches a token"]
    body.table(f"Threads, {what}", columns, rows)
    body.met[f"adds up, {what}"] = "goal" if abs(whole - 1) <= 0.1 else "missed"


def _in_process(body: Body, found: Weights, options: BenchOptions) -> None:
    """Take apart the same model's step without a mesh: what of it is inside the kernels."""
    rows = []
    for streams in STREAMS:
        bench = n2.JoiningRequests(str(found.directory), KIND, options.seed)
        for _ in range(streams):
            bench.add((PROMPT, PROMPT), (NEW_TOKENS, NEW_TOKENS))
        for _ in range(FIRST):
            bench.step()
        bench.spent.clear()
        count = options.pick(LAST - FIRST, 20)
        for _ in range(count):
            bench.step()
        rows += [
            [f"{streams}", what, f"{1e6 * spent / count:,.0f}"]
            for what, spent in bench.spent.most_common()
        ]
    body.table("The same step in process, without a mesh", ["streams", "part", "us"], rows)
