"""F3: a worker of each kind is stopped with SIGSTOP under load; the others' requests must not notice.

`python -m chaos.f3 --kills ROUNDS --json FILE`; FILE.partial resumes. Simulated devices.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from spillway_client import AsyncSpillway

from bench.document import BenchOptions
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.processes import Service
from bench.partial import PartialResults
from chaos.work import Generations
from loadgen import arrivals, bodies
from loadgen.bodies import Request
from loadgen.load import REFUSED, LoadRun, RequestRun
from loadgen.target import Target

RATES = {"embed": 30.0, "chat": 10.0, "search": 30.0}  # requests a second
DIMENSION = 32
# A lease of a stopped worker is free when its heartbeat (5 s) lapses and a reclaimer sees it.
STUCK_S, ENDED_S = 4.0, 9.0
# What a worker had asked for before it stopped may still be given to it; what comes later may not.
TAKEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Victim:
    """One process that is stopped; `works` are the kinds of requests it does, `alone` if nobody else does them."""

    name: str
    works: tuple[str, ...]
    alone: bool = False


# A generator's process runs an encoder, too; the encoder's runs no generator.
VICTIMS = (
    Victim("encoder-1", ("embed",)),
    Victim("generator-1", ("embed", "chat")),
    Victim("cpu_worker", ("embed",)),
    Victim("vector_search", ("search",), alone=True),
    Victim("kv_store", ()),
)


class Block(msgspec.Struct):
    """One block of load: by kind the seconds of each request, those that a stopped worker had taken apart.

    `refused` are requests that only the stopped worker could have done, refused at the door with these codes; `failed`
    those that failed with a code.
    """

    others_s: dict[str, list[float]] = {}
    taken_s: dict[str, list[float]] = {}
    refused: dict[str, int] = {}
    failed: dict[str, int] = {}


class Round(msgspec.Struct):
    """An undisturbed block and one in which `victim` was stopped for `seconds`; every other round ends calmly."""

    victim: str
    seconds: float
    calm: Block
    hung: Block


class Rounds(msgspec.Struct):
    """All rounds so far."""

    rounds: list[Round] = []


def services() -> list[Service]:
    """Return two workers of every kind that may have two, and one of each other."""
    flags = ("--device", "sim", "--beta", "0.005")
    return [
        processes.router(),
        *(processes.sim_worker(f"encoder-{n}", beta_s=0.005) for n in (1, 2)),
        *(processes.chat_worker(f"generator-{n}", *flags) for n in (1, 2)),
        processes.cpu_worker("cpu_worker", *flags),
        processes.vector_search(),
        processes.kv_store(),
    ]


async def run(
    rounds: int,
    seconds: float,
    data_dir: Path,
    partial: PartialResults[Rounds],
    seed: int = 1,
    *,
    calm_s: float | None = None,
) -> list[Round]:
    """Add to `partial` until every victim has so many rounds: a calm block and one with the victim stopped."""
    kept = partial.kept.rounds
    todo = [(number, victim) for number in range(rounds) for victim in VICTIMS][len(kept) :]
    async with LocalMesh(data_dir, services()) as mesh, Target([mesh.url], timeout_s=60) as target:
        requests = await _requests(mesh, seed)
        load = {kind: LoadRun(target, some) for kind, some in requests.items()}
        await _block(load, 1.0, seed, stopped_for=())
        for number, victim in todo:
            if not partial.begins():
                continue
            found = await _round(mesh, load, victim, number, calm_s or seconds, seconds, seed)
            kept.append(found)
            partial.save()
    return kept


async def _requests(mesh: LocalMesh, seed: int) -> dict[str, list[Request]]:
    rows = np.random.default_rng(5).standard_normal((1000, DIMENSION)).astype(np.float32)
    async with AsyncSpillway(mesh.url) as client:
        await client.collections.create("f3", dimension=DIMENSION, model=None)
        added = [{"id": f"v{i}", "vector": row.tolist()} for i, row in enumerate(rows)]
        await client.documents("f3").add(added)
    return {
        "embed": bodies.embed(1, 16, seed=seed),
        "chat": Generations(0.005, tokens=16).requests(64, seed),
        "search": bodies.search("f3", rows[:64], queries=1),
    }


async def _round(
    mesh: LocalMesh,
    load: dict[str, LoadRun],
    victim: Victim,
    number: int,
    calm_s: float,
    seconds: float,
    seed: int,
) -> Round:
    drawn = seed + 1000 * number
    hung: Block | None = None
    if number % 2:
        hung = await _hung(mesh, load, victim, seconds, drawn)
    calm = await _block(load, calm_s, drawn + 1, stopped_for=())
    hung = hung or await _hung(mesh, load, victim, seconds, drawn)
    return Round(victim.name, seconds, calm, hung)


async def _hung(
    mesh: LocalMesh, load: dict[str, LoadRun], victim: Victim, seconds: float, seed: int
) -> Block:
    """Run a block while a worker is stopped; one that nobody stands in for goes on at the block's end."""
    mesh.kill(victim.name, signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    again = loop.call_later(seconds, mesh.kill, victim.name, signal.SIGCONT)
    try:
        return await _block(load, seconds, seed, stopped_for=victim.works, alone=victim.alone)
    finally:
        again.cancel()
        mesh.kill(victim.name, signal.SIGCONT)
        await mesh.wait_ready(victim.name, 30)
        await asyncio.sleep(1.0)


async def _block(
    load: dict[str, LoadRun],
    seconds: float,
    seed: int,
    *,
    stopped_for: tuple[str, ...],
    alone: bool = False,
) -> Block:
    due = {k: arrivals.poisson(RATES[k], random.Random(f"{seed} {k}")) for k in load}
    async with asyncio.TaskGroup() as group:
        tasks = {k: group.create_task(load[k].open(due[k], seconds)) for k in load}
    found = Block()
    for kind, task in tasks.items():
        _sort(found, kind, task.result(), taken=kind in stopped_for, alone=alone)
    return found


def _sort(found: Block, kind: str, run: RequestRun, *, taken: bool, alone: bool) -> None:
    """Divide the requests of a kind into those of others, and those that a stopped worker has taken.

    One that is alone has all of its kind. Else it can only have those that came before it stopped or right after, and
    has those among them that took as long as a lease needs to be free again.
    """
    for sample in run.samples:
        if not sample.ok:
            away = found.refused if taken and alone and sample.status in REFUSED else found.failed
            away[sample.code] = away.get(sample.code, 0) + 1
            continue
        stuck = sample.due_s < TAKEN_S and sample.latency_s >= STUCK_S
        where = found.taken_s if taken and (alone or stuck) else found.others_s
        where.setdefault(kind, []).append(sample.latency_s)


def measure(rounds: int, seconds: float, options: BenchOptions) -> tuple[list[Round], int]:
    """Run in a directory of its own that is gone afterwards; return all rounds, and how many are left."""
    partial = PartialResults(options, Rounds)
    with tempfile.TemporaryDirectory(prefix="spillway-f3-") as folder:
        found = asyncio.run(run(rounds, seconds, Path(folder), partial, options.seed))
    return found, partial.left


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F3", sys.argv[1:]))
