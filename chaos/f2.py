"""F2: cancel, and disconnect of attached requests: queued work goes at once, running work within one step.

`python -m chaos.f2 --kills ROUNDS --json FILE`. Simulated devices: 400 ms a batch or a step.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from chaos.work import Embeddings, Generations, Work, admitted, held
from loadgen.bodies import Request
from loadgen.target import Target, TargetAnswer

IN_FLIGHT = 24
EMBEDDINGS = Embeddings(step_s=0.4, texts=16)
# A third of them runs, the others wait; none would end by itself for 40 s.
CHAT = Generations(step_s=0.4, tokens=100, env={"MAX_RUNNING": "8", "CHAT_SLO_S": "600"})
WORKER = "gpu_worker"
# Beside the step: the router hears of it, one script, and this process' own look at the bus.
SLACK_S = 0.15
OVER = frozenset({"cancelled", "result", "error", "expired", "dead"})


@dataclass(slots=True)
class Stop:
    """One way to stop work: seconds from the stop until each job was over, and how the jobs ended.

    `freed_s` is when the worker held no page and no sequence any more, `held` what it still held 5 s later.
    """

    way: str
    over_s: list[float] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    left: int = 0
    freed_s: float = 0.0
    held: dict[str, float] = field(default_factory=dict)


async def run(rounds: int, data_dir: Path, work: Work = EMBEDDINGS) -> list[Stop]:
    """Stop requests in both ways, `rounds` times each."""
    found = []
    mesh = LocalMesh(data_dir, [processes.router(), work.worker(WORKER)])
    async with mesh:
        watch = redis.asyncio.from_url(mesh.redis_url, decode_responses=True)
        try:
            for number in range(rounds):
                found.append(await _round(mesh, watch, "disconnect", number, work))
                found.append(await _round(mesh, watch, "cancel", number, work))
        finally:
            await watch.aclose()
    return found


async def _round(
    mesh: LocalMesh, watch: redis.asyncio.Redis, way: str, seed: int, work: Work
) -> Stop:
    stop = Stop(way)
    # A full device first, so that what follows is partly running and partly queued.
    requests = work.requests(IN_FLIGHT, seed * 100 + (way == "cancel"))
    before, admits = await _jobs(watch, work.kind), await admitted(mesh, work.kind)
    async with Target([mesh.url]) as target:
        sent = [asyncio.create_task(_send(target, request)) for request in requests]
        give_up = time.monotonic() + 30
        while (got := await admitted(mesh, work.kind) - admits) < IN_FLIGHT:
            early = [task.result() for task in sent if task.done()]
            if early or time.monotonic() > give_up:
                log = mesh.log("router")[-2000:]
                raise RuntimeError(
                    f"{got} of {IN_FLIGHT} admitted; answered: {early}; router: {log}"
                )
            await asyncio.sleep(0.01)
        await asyncio.sleep(work.step_s * 0.5)
        names = [name for name in await _jobs(watch, work.kind) if name not in before]
        states = {name: await _state(watch, name) for name in names}
        open_now = [name for name in names if states[name] not in OVER]
        at = time.monotonic()
        asked = [asyncio.create_task(_cancel(target, n)) for n in open_now if way == "cancel"]
        if way == "disconnect":
            for task in sent:
                task.cancel()
        await _follow(watch, open_now, at, stop)
        await _freed(mesh, at, stop, work)
        await asyncio.gather(*asked)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
    return stop


async def _send(target: Target, request: Request) -> TargetAnswer:
    return await target.send(request)


async def _cancel(target: Target, name: str) -> None:
    await target.send(Request(f"/v1/requests/{name}/cancel", b"", 0))


async def _jobs(watch: redis.asyncio.Redis, kind: str) -> set[str]:
    keys = watch.scan_iter(match=f"{{{kind}.*:job:*", count=1000)
    return {str(key).partition(":job:")[2] async for key in keys}


async def _state(watch: redis.asyncio.Redis, name: str) -> str:
    family, partition, _ = name.split("~")
    return str(await watch.hget(f"{{{family}/{partition}}}:job:{name}", "state"))


async def _follow(watch: redis.asyncio.Redis, names: list[str], at: float, stop: Stop) -> None:
    waiting, ends = set(names), Counter[str]()
    while waiting and time.monotonic() - at < 5.0:
        for name in sorted(waiting):
            state = await _state(watch, name)
            if state in OVER:
                stop.over_s.append(time.monotonic() - at)
                ends[state] += 1
                waiting.discard(name)
        await asyncio.sleep(0.005)
    stop.ends, stop.left = dict(ends), len(waiting)


async def _freed(mesh: LocalMesh, at: float, stop: Stop, work: Work) -> None:
    limit = time.monotonic() + 5.0
    while (holds := await held(mesh, WORKER, work)) and time.monotonic() < limit:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    stop.freed_s, stop.held = time.monotonic() - at, holds


def measure(rounds: int, work: Work = EMBEDDINGS) -> list[Stop]:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f2-") as folder:
        return asyncio.run(run(rounds, Path(folder), work))


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F2", sys.argv[1:]))
