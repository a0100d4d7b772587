"""F2: cancel, and disconnect of attached requests: queued work goes at once, running work within one step.

`python -m loadgen.faults.f2 --kills ROUNDS --json FILE`. Simulated device, 400 ms a batch.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio

from loadgen import bodies, processes
from loadgen.bodies import Request
from loadgen.mesh import Mesh
from loadgen.target import Target

STEP_S = 0.4
IN_FLIGHT = 24
# Beside the step: the router hears of it, one script, and this process' own look at the bus.
SLACK_S = 0.15
OVER = frozenset({"cancelled", "result", "error", "expired", "dead"})


@dataclass(slots=True)
class Stop:
    """One way to stop work: seconds from the stop until each job was over, and how the jobs ended."""

    way: str
    over_s: list[float] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    left: int = 0


async def run(rounds: int, data_dir: Path) -> list[Stop]:
    """Stop requests in both ways, `rounds` times each."""
    found = []
    mesh = Mesh(data_dir, [processes.router(), processes.sim_worker(beta_s=STEP_S)])
    async with mesh:
        watch = redis.asyncio.from_url(mesh.redis_url, decode_responses=True)
        try:
            for number in range(rounds):
                found.append(await _round(mesh, watch, "disconnect", number))
                found.append(await _round(mesh, watch, "cancel", number))
        finally:
            await watch.aclose()
    return found


async def _round(mesh: Mesh, watch: redis.asyncio.Redis, way: str, seed: int) -> Stop:
    stop = Stop(way)
    # A full device first, so that what follows is partly running and partly queued.
    requests = bodies.embed(16, 16, seed=seed * 100 + (way == "cancel"), count=IN_FLIGHT)
    before = await _jobs(watch)
    async with Target([mesh.url]) as target:
        sent = [asyncio.create_task(_send(target, request)) for request in requests]
        await asyncio.sleep(STEP_S * 1.5)
        names = [name for name in await _jobs(watch) if name not in before]
        states = {name: await _state(watch, name) for name in names}
        open_now = [name for name in names if states[name] not in OVER]
        at = time.monotonic()
        asked = [asyncio.create_task(_cancel(target, n)) for n in open_now if way == "cancel"]
        if way == "disconnect":
            for task in sent:
                task.cancel()
        await _follow(watch, open_now, at, stop)
        await asyncio.gather(*asked)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
    return stop


async def _send(target: Target, request: Request) -> None:
    await target.send(request)


async def _cancel(target: Target, name: str) -> None:
    await target.send(Request(f"/v1/requests/{name}/cancel", b"", 0))


async def _jobs(watch: redis.asyncio.Redis) -> set[str]:
    keys = watch.scan_iter(match="{embed.*:job:*", count=1000)
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


def measure(rounds: int) -> list[Stop]:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f2-") as folder:
        return asyncio.run(run(rounds, Path(folder)))


if __name__ == "__main__":
    import sys

    from loadgen.faults.command import main

    sys.exit(main("F2", sys.argv[1:]))
