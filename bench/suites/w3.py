"""W3: deadline misses under bursts of texts of 20 to 500 tokens: WindVE's policies, replayed and through the mesh."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.simulation.replay import POLICIES, Device, Policy, Replay, texts
from common.cost.linear import LinearCost, Probe, fit
from loadgen import arrivals, bodies
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target

SLO_S = 1.0
LOADS = (0.7, 1.2, 2.0)
QUERY = 75
# The paper's V100 and Xeon, a query of 75 tokens spread over its tokens.
PAPER = (LinearCost(0.27, 0.0, 0.01793 / QUERY), LinearCost(0.32, 0.0, 0.0820 / QUERY))
# The second process has a fifth of the first one's speed in the replay, as the paper's Xeon has of its V100.
SLOWER = 5.0
LONGEST = 250  # tokens of a real text: MiniLM takes 256
MEASURED = 300


def run(options: BenchOptions) -> Body:
    """Replay on the virtual clock with the encoder's own noise, then send the same load to real encoders."""
    body = Body()
    cost, noises = encoder(options.pick(MEASURED, 40))
    body.samples["noise"] = noises

    def noise(rng: random.Random) -> float:
        return rng.choice(noises)

    kinds = {
        "encoder": ((cost, cost.scaled(SLOWER)), options.pick(150, 30)),
        "paper's V100 + Xeon": (PAPER, options.pick(1500, 120)),
    }
    rows: list[list[str]] = []
    worst_miss, least = 0.0, 1.0
    for name, (costs, seconds) in kinds.items():
        devices = [Device(one, noise) for one in costs]
        for load in LOADS:
            cells, missed, share = replayed(name, devices, load, seconds, options.seed, body)
            rows += cells
            worst_miss, least = max(worst_miss, missed), min(least, share)
    columns = ["devices", "load", "policy", "offered", "admitted to accelerator + CPU"]
    columns += ["late", "tokens in time / clairvoyant's"]
    body.table(f"Replayed on a virtual clock, all due within {SLO_S:g} s", columns, rows)
    with tempfile.TemporaryDirectory(prefix="spillway-w3-") as folder:
        real = asyncio.run(_real(Path(folder), cost, options, body))
    columns = ["policy", "offered", "answered in time", "late", "refused", "tokens in time per s"]
    title = "Two real encoder processes, one thread each, bursts at 1.5 times what both can do"
    body.table(title, columns, real)
    body.met["late, windve-tokens"] = _level(worst_miss, 0.001, 0.01, less=True)
    body.met["tokens in time, windve-tokens / clairvoyant"] = _level(least, 0.95, 0.85, less=False)
    late = f"p99 {np.percentile(noises, 99):.3f}, at the most {max(noises):.3f}"
    body.notes += [
        "Clairvoyant: knows how long every batch to come will take; admits in order of arrival, too.",
        f"Noise: drawn from {len(noises)} batches of the real encoder, measured over fitted seconds: {late}.",
        "Load: of what both devices can do in full batches; bursts of 4 times that for 1 s on average, then silence.",
        f"The encoder's second device is {SLOWER:g} times slower; real texts have 20 to {LONGEST} tokens.",
        "The other policies admit by depths in queries of 75 tokens: of the true line, or as probes found.",
    ]
    return body


def encoder(batches: int) -> tuple[LinearCost, list[float]]:
    """Return the encoder's fitted cost on one thread, and measured over fitted seconds of many batches."""
    from engine.models.encoders.encoder import Encoder  # noqa: PLC0415 - torch only where it computes

    model = Encoder.load("", device="cpu", dtype="auto", threads=1, cache=None)
    rng, probes = random.Random(7), list[Probe]()
    for _ in range(batches):
        sizes = [rng.randint(20, 500) for _ in range(rng.randint(1, 12))]
        rows = [[rng.randint(1000, 20_000) for _ in range(size)] for size in sizes]
        began = time.perf_counter()
        model.encode(rows)
        probes.append(Probe(len(rows), sum(map(len, rows)), time.perf_counter() - began))
    cost = fit(probes)
    return cost, [probe.seconds / cost.seconds(probe.items, probe.tokens) for probe in probes]


def capacity(costs: tuple[LinearCost, ...]) -> float:
    """Return the texts a second of the mean length that devices can do in batches that fill half the objective."""
    mean = 260
    total = 0.0
    for cost in costs:
        each = cost.alpha_items_s + mean * cost.alpha_tokens_s
        count = max(1.0, (SLO_S / 2 - cost.beta_s) / each)
        total += count / cost.seconds(round(count), round(count * mean))
    return total


def replayed(
    name: str, devices: list[Device], load: float, seconds: float, seed: int, body: Body
) -> tuple[list[list[str]], float, float]:
    """Replay every policy on one trace; return table rows, our misses, and our tokens over the clairvoyant's."""
    rate = load * capacity(tuple(device.cost for device in devices))
    rng = random.Random(seed)
    trace = texts(arrivals.bursty(rate, rng), rng, seconds=seconds, within_s=SLO_S)
    rows, bound, ours = [], 1, (0.0, 1.0)
    for policy in POLICIES:
        done = Replay(devices, policy, slo_s=SLO_S, seed=seed).run(trace)
        bound = done.tokens if policy == "clairvoyant" else bound
        share = done.tokens / max(1, bound)
        if policy == "windve-tokens":
            ours = (done.miss_ratio, share)
        rows.append(
            [
                name, f"{load:g}", policy, f"{done.offered:,}", " + ".join(map(str, done.admitted)),
                f"{100 * done.miss_ratio:.3f} %", f"{share:.3f}",
            ]
        )  # fmt: skip
        body.samples[f"{name}/{load:g}/{policy}"] = {"missed": done.miss_ratio, "share": share}
    return rows, *ours


def _level(value: float, goal: float, must: float, *, less: bool) -> str:
    if less:
        value, goal, must = -value, -goal, -must
    return "goal" if value >= goal else "must" if value >= must else "missed"


async def _real(
    folder: Path, cost: LinearCost, options: BenchOptions, body: Body
) -> list[list[str]]:
    ours: tuple[Policy, ...] = POLICIES[1:]
    return [await _through(folder / each, each, cost, options, body) for each in ours]


async def _through(
    folder: Path, policy: Policy, cost: LinearCost, options: BenchOptions, body: Body
) -> list[str]:
    flags = ("--device", "cpu", "--threads", "1", "--embed-slo-s", str(SLO_S))
    services = [
        processes.router(),
        processes.gpu_worker("gpu_worker", *flags),
        processes.cpu_worker("cpu_worker", *flags),
    ]
    mesh = LocalMesh(folder, services, env={"SPILLWAY_ADMISSION": policy})
    rng = random.Random(options.seed)
    asked = [_request(rng) for _ in range(2000)]
    seconds = options.pick(45, 8)
    rate = 1.5 * capacity((cost, cost))
    try:
        await mesh.start(600.0)
        async with Target([mesh.url], timeout_s=30) as target:
            load = LoadRun(target, asked)
            await load.open(arrivals.steady(20.0), 3.0)
            done = await load.open(
                arrivals.bursty(rate, random.Random(options.seed)), float(seconds)
            )
    finally:
        await mesh.stop()
    ok = [sample for sample in done.samples if sample.ok]
    late = [sample for sample in ok if sample.done_s - sample.sent_s > SLO_S]
    refused = sum(sample.status == 429 for sample in done.samples)
    in_time = sum(sample.items for sample in ok) - sum(sample.items for sample in late)
    body.samples[f"mesh/{policy}"] = [sample.done_s - sample.sent_s for sample in ok]
    return [
        policy, f"{len(done.samples):,}", f"{len(ok) - len(late):,}", f"{100 * len(late) / max(1, len(ok)):.2f} %",
        f"{refused:,}", f"{in_time / done.seconds:,.0f}",
    ]  # fmt: skip


def _request(rng: random.Random) -> Request:
    """Return a request of one text; its tokens are what is counted."""
    tokens = rng.randint(20, LONGEST)
    asked = {"input": bodies.text(tokens, rng), "encoding_format": "base64"}
    return Request("/v1/embeddings", msgspec.json.encode(asked), tokens)
