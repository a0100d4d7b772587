"""W3: deadline misses under bursts of texts of 20 to 500 tokens: WindVE's policies, replayed and through the mesh."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.simulation.bound import most_tokens
from bench.simulation.replay import POLICIES, Device, Policy, Replay, clairvoyant, texts
from bench.simulation.speed import SpeedTrace, burdened, measured
from common.cost.linear import LinearCost, Probe, fit
from loadgen import arrivals, bodies, stats
from loadgen.bodies import Request
from loadgen.load import LoadRun, RequestRun
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
# So much slower do bursts make devices that share cores with the rest of the mesh, as batches through the mesh were.
BURDEN = 1.7
ALONE = f"Replayed on a virtual clock, all due within {SLO_S:g} s"
BESIDE = (
    f"The same, where bursts slow both devices down by up to {BURDEN:g} times, as on shared cores"
)
LEARN_S = 15
REFUSED = 429


def run(options: BenchOptions) -> Body:
    """Replay on the virtual clock with the encoder's own speeds, then send the same load to real encoders."""
    body = Body()
    cost, probes = encoder(options.pick(MEASURED, 40))
    noises = [probe.seconds / cost.seconds(probe.items, probe.tokens) for probe in probes]
    body.samples["noise"] = noises
    speed = measured(cost, probes)
    kinds = {
        "encoder": ((cost, cost.scaled(SLOWER)), options.pick(150, 20)),
        "paper's V100 + Xeon": (PAPER, options.pick(1500, 120)),
    }
    found: dict[str, list[PolicyCell]] = {}
    for name, (costs, seconds) in kinds.items():
        for load in LOADS:
            cell = replayed(name, costs, speed, load, seconds, options)
            found.setdefault(ALONE, []).append(cell)
    costs, seconds = kinds["encoder"]
    for load in LOADS:
        cell = replayed("encoder", costs, speed, load, seconds, options, BURDEN)
        found.setdefault(BESIDE, []).append(cell)
    columns = ["devices", "load", "policy", "offered", "admitted to accelerator + CPU"]
    columns += ["late", "tokens in time / clairvoyant's", "/ bound"]
    for title, cells in found.items():
        body.table(title, columns, [row for cell in cells for row in cell.rows])
        body.samples |= {name: one for cell in cells for name, one in cell.samples.items()}
    with tempfile.TemporaryDirectory(prefix="spillway-w3-") as folder:
        real = asyncio.run(_real(Path(folder), cost, options, body))
    columns = ["policy", "offered", "answered in time", "late", f"late in the first {LEARN_S:g} s"]
    columns += ["refused", "refused after p50 / p99 (ms)", "tokens in time per s"]
    title = "Two real encoder processes, one thread each, bursts at 1.5 times what both can do"
    body.table(title, columns, [each.row for each in real])
    misses = [cell.missed for cells in found.values() for cell in cells]
    shares = [cell.share for cell in found[ALONE]]
    body.met["late, windve-tokens"] = _level(max(misses), 0.001, 0.01, less=True)
    body.met["tokens in time, windve-tokens / clairvoyant"] = _level(
        min(shares), 0.95, 0.85, less=False
    )
    body.met["late through the mesh, windve-tokens"] = _level(
        real[0].missed, 0.001, 0.01, less=True
    )
    late = f"p99 {np.percentile(noises, 99):.3f}, at the most {max(noises):.3f}"
    body.notes += [
        "Clairvoyant: knows every speed to come and admits in order of arrival; the best of several spare times.",
        "Bound: all devices as one fluid without batches, served with hindsight by the earliest deadline.",
        "No policy exceeds the bound; where batches are few and long none comes near it.",
        f"Speeds: those of {len(noises)} batches of the real encoder over time; measured over fitted seconds: {late}.",
        "Load: of what both devices can do in full batches; bursts of 4 times that for 1 s on average, then silence.",
        f"The encoder's second device is {SLOWER:g} times slower; real texts have 20 to {LONGEST} tokens.",
        "The other policies admit by depths in queries of 75 tokens: of the true line, or as probes found.",
        "Late: counted from when a request was due to be sent, whenever the load generator came to send it.",
    ]
    return body


def encoder(batches: int) -> tuple[LinearCost, list[Probe]]:
    """Return the encoder's fitted cost on one thread, and the batches that it ran one after the other."""
    from engine.models.encoders.encoder import Encoder  # noqa: PLC0415 - torch only where it computes

    model = Encoder.load("", device="cpu", dtype="auto", threads=1, cache=None)
    rng, probes = random.Random(7), list[Probe]()
    for _ in range(batches):
        sizes = [rng.randint(20, 500) for _ in range(rng.randint(1, 12))]
        rows = [[rng.randint(1000, 20_000) for _ in range(size)] for size in sizes]
        began = time.perf_counter()
        model.encode(rows)
        probes.append(Probe(len(rows), sum(map(len, rows)), time.perf_counter() - began))
    return fit(probes), probes


def capacity(costs: Sequence[LinearCost]) -> float:
    """Return the texts a second of the mean length that devices can do in batches that fill half the objective."""
    mean = 260
    total = 0.0
    for cost in costs:
        each = cost.alpha_items_s + mean * cost.alpha_tokens_s
        count = max(1.0, (SLO_S / 2 - cost.beta_s) / each)
        total += count / cost.seconds(round(count), round(count * mean))
    return total


class PolicyCell(NamedTuple):
    """Every policy on one trace: rows, samples, and what windve-tokens missed and did of a clairvoyant's tokens."""

    rows: list[list[str]]
    samples: dict[str, dict[str, float]]
    missed: float
    share: float


def replayed(
    name: str,
    costs: Sequence[LinearCost],
    speed: SpeedTrace,
    load: float,
    seconds: float,
    options: BenchOptions,
    burden: float = 1.0,
) -> PolicyCell:
    """Replay every policy on one trace, by devices that bursts make up to `burden` times slower."""
    rate, rng = load * capacity(costs), random.Random(options.seed)
    trace = texts(arrivals.bursty(rate, rng), rng, seconds=seconds, within_s=SLO_S)
    times_s = [arrival.at_s for arrival in trace]
    apart_s = speed.step_s * len(speed.factors) / len(costs)
    devices = [
        Device(cost, burdened(speed.rotated(number * apart_s), times_s, rate, burden))
        for number, cost in enumerate(costs)
    ]
    most = most_tokens(trace, devices)
    best = clairvoyant(trace, devices, slo_s=SLO_S)
    done = {"clairvoyant": best}
    done |= {each: Replay(devices, each, slo_s=SLO_S).run(trace) for each in POLICIES[1:]}
    rows, samples = [], dict[str, dict[str, float]]()
    for policy, one in done.items():
        share, of_most = one.tokens / max(1, best.tokens), one.tokens / max(1.0, most)
        admitted = " + ".join(map(str, one.admitted))
        row = [name, f"{load:g}", policy, f"{one.offered:,}", admitted]
        rows.append([*row, f"{100 * one.miss_ratio:.3f} %", f"{share:.3f}", f"{of_most:.3f}"])
        key = f"{name}{', burdened' if burden > 1 else ''}/{load:g}/{policy}"
        samples[key] = {"missed": one.miss_ratio, "share": share, "of_bound": of_most}
    ours = done["windve-tokens"]
    return PolicyCell(rows, samples, ours.miss_ratio, ours.tokens / max(1, best.tokens))


def _level(value: float, goal: float, must: float, *, less: bool) -> str:
    if less:
        value, goal, must = -value, -goal, -must
    return "goal" if value >= goal else "must" if value >= must else "missed"


class Through(NamedTuple):
    """One policy through the mesh: its table row, and the share of the answers that were late."""

    row: list[str]
    missed: float


async def _real(folder: Path, cost: LinearCost, options: BenchOptions, body: Body) -> list[Through]:
    ours: tuple[Policy, ...] = POLICIES[1:]
    return [await _through(folder / each, each, cost, options, body) for each in ours]


async def _through(
    folder: Path, policy: Policy, cost: LinearCost, options: BenchOptions, body: Body
) -> Through:
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
            early = arrivals.bursty(rate, random.Random(options.seed + 1))
            first = await load.open(early, options.pick(LEARN_S, 5))
            done = await load.open(
                arrivals.bursty(rate, random.Random(options.seed)), float(seconds)
            )
    finally:
        await mesh.stop()
    ok = [sample for sample in done.samples if sample.ok]
    in_time = [sample for sample in ok if sample.latency_s <= SLO_S]
    refused = [1e3 * sample.latency_s for sample in done.samples if sample.status == REFUSED]
    body.samples[f"mesh/{policy}"] = [sample.latency_s for sample in ok]
    body.samples[f"first/{policy}"] = [sample.latency_s for sample in first.samples if sample.ok]
    after = stats.percentiles(refused or [0.0])
    row = [
        policy, f"{len(done.samples):,}", f"{len(in_time):,}", f"{100 * _late(done):.2f} %",
        f"{100 * _late(first):.2f} %", f"{len(refused):,}", f"{after['p50']:.0f} / {after['p99']:.0f}",
        f"{sum(sample.items for sample in in_time) / done.seconds:,.0f}",
    ]  # fmt: skip
    return Through(row, _late(done))


def _late(done: RequestRun) -> float:
    """Return the share of the answers that came after the objective, counted from when each request was due."""
    waits = [sample.latency_s for sample in done.samples if sample.ok]
    return sum(wait > SLO_S for wait in waits) / max(1, len(waits))


def _request(rng: random.Random) -> Request:
    """Return a request of one text; its tokens are what is counted."""
    tokens = rng.randint(20, LONGEST)
    asked = {"input": bodies.text(tokens, rng), "encoding_format": "base64"}
    return Request("/v1/embeddings", msgspec.json.encode(asked), tokens)
