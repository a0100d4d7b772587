"""W2: the depth that the estimator predicts for real encoders, against exhaustive search on the same processes.

Two processes with one thread each, MiniLM in both, through the mesh. One plays the accelerator; the other computes
everything several times over, so that its speed is to the first one's about as the paper's Xeon's to its V100's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from common.bus import Bus, keys
from common.clock import SystemClock
from common.config import Common
from common.cost.estimate import estimate
from common.cost.linear import LinearCost
from common.ids import Family
from common.wire.message import decode
from common.wire.registry import DepthRecord, WorkerRecord
from engine.models.encoders.encoder import Encoder
from services.adapters.encode.depth_finder import Prober

SLO_S = 0.3
SWEEP_SLO_S = 1.0
LENGTHS = (32, 75, 150, 250)
SLOWER = 5
ROUNDS = 20
SEARCH_ROUNDS = 5
START_S = 600.0
LANES = ("gpu", "cpu")


class Pair(NamedTuple):
    """Seconds of the accelerator's and the CPU's last answer of one round."""

    gpu: float
    cpu: float


def run(options: BenchOptions) -> Body:
    """Let the workers find their depths, then search exhaustively and send closed rounds at and above them."""
    body = Body(notes=["One of two processes plays the accelerator; every text has 75 tokens."])
    body.notes.append(asyncio.run(_shared()))
    with tempfile.TemporaryDirectory(prefix="spillway-w2-") as folder:
        asyncio.run(_measure(Path(folder), options, body))
    _sweep(options, body)
    return body


def _sweep(options: BenchOptions, body: Body) -> None:
    """Depths by query length and by cores: the paper's Figures 5 and 6, on this machine."""
    rows = []
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        model = Encoder.load("", device="cpu", threads=threads)
        for tokens in LENGTHS[:1] if options.quick else LENGTHS:

            async def probe(queries: int, tokens: int = tokens, model: Encoder = model) -> float:
                rows = [[7 + i % 900 for i in range(tokens)]] * queries
                began = time.perf_counter()
                model.encode(rows)
                return time.perf_counter() - began

            line = asyncio.run(estimate(probe, SWEEP_SLO_S))
            slow = LinearCost(line.beta_s, line.alpha_s, 0.0).scaled(SLOWER)
            beside = slow.queries_of(SWEEP_SLO_S)
            rows.append(
                [
                    str(tokens), str(threads), f"{line.alpha_s * 1e3:.2f}", f"{line.beta_s * 1e3:.1f}",
                    f"{line.r2:.4f}", str(line.depth), str(beside), f"{100 * beside / max(1, line.depth):.1f} %",
                ]
            )  # fmt: skip
    columns = ["tokens a query", "cores", "alpha (ms)", "beta (ms)", "r²", "depth"]
    columns += [f"depth of a device {SLOWER} times slower", "gain"]
    body.table(f"By length and cores, in process, within {SWEEP_SLO_S:g} s", columns, rows)


async def _shared() -> str:
    """Say what the cores share: one encoder's texts a second alone, and beside another one."""
    code = (
        "import time, sys\n"
        "from engine.models.encoders.encoder import Encoder\n"
        "m = Encoder.load('', device='cpu', threads=1)\n"
        "rows = [[7 + i for i in range(75)]] * 32\n"
        "m.encode(rows); print('up', flush=True); sys.stdin.readline(); n, t = 0, time.perf_counter()\n"
        "while time.perf_counter() - t < 4: m.encode(rows); n += 32\n"
        "print(n / (time.perf_counter() - t))\n"
    )
    cores = sorted(os.sched_getaffinity(0))

    async def rates(count: int) -> list[float]:
        made = [
            await asyncio.create_subprocess_exec(
                "taskset", "-c", str(cores[-1 - n]), sys.executable, "-c", code,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )
            for n in range(count)
        ]  # fmt: skip
        for one in made:
            assert one.stdout
            await one.stdout.readline()
        outs = await asyncio.gather(*(one.communicate(b"\n") for one in made))
        return [float(out.decode().split()[-1]) for out, _ in outs]

    (alone,) = await rates(1)
    both = await rates(2)
    return (
        f"What the two cores share: one process computes {alone:.0f} texts/s alone, {both[0]:.0f} and {both[1]:.0f} "
        "beside each other."
    )


async def _measure(folder: Path, options: BenchOptions, body: Body) -> None:
    cores = sorted(os.sched_getaffinity(0))
    flags = ("--device", "cpu", "--threads", "1", "--embed-slo-s", str(SLO_S))
    services = [
        processes.pinned(processes.gpu_worker("gpu_worker", *flags), cores[-1]),
        processes.pinned(
            processes.cpu_worker("cpu_worker", *flags, "--slowdown", str(SLOWER)), cores[0]
        ),
    ]
    mesh = LocalMesh(folder, services, env={"SPILLWAY_ADMISSION": "windve"})
    model = Encoder.load("", device="cpu", threads=1)
    try:
        await mesh.start(START_S)
        bus = await Bus.open(Common(redis_url=mesh.redis_url), SystemClock())
        try:
            await _rounds(bus, Family(model.card().family), model, options, body)
        finally:
            await bus.close()
    finally:
        await mesh.stop()


async def _rounds(
    bus: Bus, family: Family, model: Encoder, options: BenchOptions, body: Body
) -> None:
    workers = {w.classes[0]: w for w in await bus.workers.living(family)}
    kept = await bus.connection.call("HGETALL", keys.depths(family))
    named = dict(zip(kept[::2], kept[1::2], strict=True))
    found = {name.decode().split()[0]: decode(raw, DepthRecord) for name, raw in named.items()}
    prober = Prober(bus, family, model)
    rounds = options.rounds(ROUNDS, 3)

    async def both(gpu: int, cpu: int) -> Pair:
        took = await prober.probe({workers["gpu"].worker: gpu, workers["cpu"].worker: cpu})
        return Pair(took[workers["gpu"].worker], took[workers["cpu"].worker])

    rows, close, fits = [], True, True
    try:
        for lane in LANES:
            one = found[lane]
            deep = await _exhaustive(prober, workers[lane], one.by_line)
            near = abs(one.by_line - deep) <= max(1, 0.05 * deep)
            close = close and near
            fits = fits and one.r2 >= 0.98
            body.samples[lane] = {"points": one.points, "by_line": one.by_line, "exhaustive": deep}
            rows.append(
                [
                    lane, f"{one.alpha_s * 1e3:.2f}", f"{one.beta_s * 1e3:.1f}", f"{one.r2:.4f}",
                    str(one.by_line), str(deep), f"{100 * (one.by_line / max(1, deep) - 1):+.1f} %", str(one.depth),
                ]
            )  # fmt: skip
        depth = {lane: found[lane].depth for lane in LANES}
        at = [await both(depth["gpu"], depth["cpu"]) for _ in range(rounds)]
        alone = [await both(depth["gpu"], 0) for _ in range(rounds)]
        above = [await both(depth["gpu"] + 2, depth["cpu"]) for _ in range(rounds)]
        above_cpu = [await both(depth["gpu"], depth["cpu"] + 2) for _ in range(rounds)]
    finally:
        await prober.close()
    columns = [
        "lane",
        "alpha (ms)",
        "beta (ms)",
        "r²",
        "by the line",
        "exhaustive",
        "off by",
        "tuned together",
    ]
    body.table(f"Depth in queries within {SLO_S:g} s", columns, rows)
    checks = {
        "both at their depths": [max(pair) for pair in at],
        "accelerator alone at its depth": [pair.gpu for pair in alone],
        "accelerator at depth + 2": [max(pair) for pair in above],
        "CPU at depth + 2": [max(pair) for pair in above_cpu],
    }
    cells = [
        [name, str(len(took)), str(sum(one > SLO_S for one in took)), f"{1e3 * max(took):.0f}"]
        for name, took in checks.items()
    ]
    body.table("Closed rounds", ["round", "rounds", "over the objective", "slowest (ms)"], cells)
    body.samples["rounds"] = checks
    body.met["predicted against exhaustive"] = "goal" if close else "missed"
    body.met["r² at least 0.98"] = "goal" if fits else "missed"
    body.met["no breach at the tuned depths"] = (
        "goal" if max(checks["both at their depths"]) <= SLO_S else "missed"
    )
    over = [max(checks["accelerator at depth + 2"]), max(checks["CPU at depth + 2"])]
    body.met["a breach at depth + 2"] = "goal" if min(over) > SLO_S else "missed"


async def _exhaustive(prober: Prober, worker: WorkerRecord, about: int) -> int:
    """Return the deepest that no round of several breached, going up one by one from well below."""
    deep = 0
    for queries in range(max(1, about * 3 // 4), about * 2 + 4):
        for _ in range(SEARCH_ROUNDS):
            if (await prober.probe({worker.worker: queries}))[worker.worker] > SLO_S:
                return deep
        deep = queries
    return deep
