"""F4: a router, then a worker, gets SIGTERM with 50 requests in flight; none may be cut short.

`python -m loadgen.faults.f4 --kills ROUNDS --json FILE`. Simulated devices, 1.5 s a batch.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis.asyncio

from loadgen import bodies, probe, processes
from loadgen.mesh import Mesh
from loadgen.target import Answer, Target

IN_FLIGHT = 50
UNREADY_S = 0.1
# Long enough that none of them is answered before the last has been accepted.
BATCH_S = 1.5


@dataclass(slots=True)
class Drain:
    """One SIGTERM: seconds until unready and until the process was gone, and what the requests got."""

    victim: str
    unready_s: float = 0.0
    gone_s: float = 0.0
    exit_code: int | None = None
    whole: int = 0
    cut: dict[str, int] = field(default_factory=dict)


async def run(rounds: int, data_dir: Path) -> list[Drain]:
    """Drain a router and a worker, `rounds` times each."""
    workers = [processes.sim_worker(f"gpu_worker-{i}", beta_s=BATCH_S) for i in (1, 2)]
    routers = [processes.router("router-1"), processes.router("router-2")]
    found = []
    async with Mesh(data_dir, [*routers, *workers]) as mesh:
        for number in range(rounds):
            found.append(await _drain(mesh, "router-1", mesh.urls[0], 2 * number))
            found.append(await _drain(mesh, "gpu_worker-1", mesh.urls[1], 2 * number + 1))
    return found


async def _drain(mesh: Mesh, victim: str, url: str, number: int) -> Drain:
    drain = Drain(victim)
    requests = bodies.embed(1, 16, seed=number, count=IN_FLIGHT)
    async with Target([url], timeout_s=60) as target:
        sent = [asyncio.create_task(target.send(request)) for request in requests]
        await _accepted(mesh, IN_FLIGHT * (number + 1))
        port = mesh.health_port(victim) or 0
        at = time.monotonic()
        mesh.kill(victim, signal.SIGTERM)
        await probe.until_unready(port)
        drain.unready_s = time.monotonic() - at
        for answer in await asyncio.gather(*sent):
            _judge(drain, answer)
    drain.exit_code = await mesh.wait_end(victim, 60)
    drain.gone_s = time.monotonic() - at
    await mesh.restart(victim)
    return drain


async def _accepted(mesh: Mesh, count: int) -> None:
    """Wait until the bus has admitted so many jobs since the mesh began."""
    client = redis.asyncio.from_url(mesh.redis_url, decode_responses=True)
    try:
        async with asyncio.timeout(30):
            while True:
                use = await client.hgetall("{embed.sim/0}:use")
                if int(use.get("admits", 0)) >= count:
                    return
                await asyncio.sleep(0.01)
    finally:
        await client.aclose()


def _judge(drain: Drain, answer: Answer) -> None:
    code = answer.code or f"status {answer.status}"
    if answer.status == 200:
        try:
            if len(msgspec.json.decode(answer.body)["data"]) == 1:
                drain.whole += 1
                return
        except (msgspec.DecodeError, KeyError):
            code = "truncated"
    drain.cut[code] = drain.cut.get(code, 0) + 1


def measure(rounds: int) -> list[Drain]:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f4-") as folder:
        return asyncio.run(run(rounds, Path(folder)))


if __name__ == "__main__":
    import sys

    from loadgen.faults.command import main

    sys.exit(main("F4", sys.argv[1:]))
