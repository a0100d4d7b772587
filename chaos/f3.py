"""F3: one of two workers is stopped with SIGSTOP under load; the others' requests must not notice.

`python -m chaos.f3 --kills ROUNDS --json FILE`. Simulated devices.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from loadgen import arrivals, bodies
from loadgen.load import LoadRun, RequestRun
from loadgen.target import Target

RATE = 60.0
# A lease of a stopped worker is free when its heartbeat (5 s) lapses and a reclaimer sees it.
STUCK_S = 4.0
ENDED_S = 9.0


@dataclass(slots=True)
class Round:
    """Latencies of one undisturbed block and of the block in which a worker was stopped, in seconds."""

    calm_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)
    stuck_s: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)


async def run(
    rounds: int, seconds: float, seed: int, data_dir: Path, *, calm_s: float | None = None
) -> list[Round]:
    """Measure so many rounds: a calm block, then one with a stopped worker, which then goes on."""
    workers = [processes.sim_worker(f"gpu_worker-{i}", beta_s=0.005) for i in (1, 2)]
    found = []
    mesh = LocalMesh(data_dir, [processes.router(), *workers])
    async with mesh, Target([mesh.url], timeout_s=30) as target:
        load = LoadRun(target, bodies.embed(1, 16, seed=seed))
        await load.open(arrivals.steady(RATE), 1.0)
        for number in range(rounds):
            victim = workers[number % 2].name
            found.append(
                await _round(mesh, load, victim, calm_s or seconds, seconds, seed + number)
            )
    return found


async def _round(
    mesh: LocalMesh, load: LoadRun, victim: str, calm_s: float, seconds: float, seed: int
) -> Round:
    calm = await load.open(arrivals.poisson(RATE, random.Random(seed)), calm_s)
    mesh.kill(victim, signal.SIGSTOP)
    try:
        hung = await load.open(arrivals.poisson(RATE, random.Random(seed + 10_000)), seconds)
    finally:
        mesh.kill(victim, signal.SIGCONT)
    await mesh.wait_ready(victim, 30)
    await asyncio.sleep(1.0)
    return _sort(calm, hung)


def _sort(calm: RequestRun, hung: RequestRun) -> Round:
    latencies = [s.latency_s for s in hung.samples if s.ok]
    failed: dict[str, int] = {}
    for sample in (*calm.samples, *hung.samples):
        if not sample.ok:
            failed[sample.code] = failed.get(sample.code, 0) + 1
    return Round(
        calm_s=[s.latency_s for s in calm.samples if s.ok],
        others_s=[latency for latency in latencies if latency < STUCK_S],
        stuck_s=[latency for latency in latencies if latency >= STUCK_S],
        failed=failed,
    )


def measure(rounds: int, seconds: float, seed: int) -> list[Round]:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f3-") as folder:
        return asyncio.run(run(rounds, seconds, seed, Path(folder)))


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F3", sys.argv[1:]))
