"""F4: a router, then a worker, gets SIGTERM with 50 requests in flight; none may be cut short.

`python -m chaos.f4 --kills ROUNDS --json FILE`. Simulated devices: batches of 1.5 s, streams of 3 s.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.mesh import probe, processes
from bench.mesh.local_mesh import LocalMesh
from chaos.work import Embeddings, Generations, Work, admitted
from loadgen.target import Target, TargetAnswer

IN_FLIGHT = 50
UNREADY_S = 0.1
# Both long enough that none of them is answered before the last has been accepted.
EMBEDDINGS = Embeddings(step_s=1.5, texts=1)
CHAT = Generations(step_s=0.05, tokens=60)
# Less time to drain than the streams last, so the worker must hand over what it has not finished.
HANDED = Generations(step_s=0.05, tokens=60, env={"DRAIN_S": "1"})


@dataclass(slots=True)
class Drain:
    """One SIGTERM: seconds until unready and until the process was gone, and what the requests got."""

    victim: str
    unready_s: float = 0.0
    gone_s: float = 0.0
    exit_code: int | None = None
    whole: int = 0
    cut: dict[str, int] = field(default_factory=dict)


async def run(rounds: int, data_dir: Path, work: Work = EMBEDDINGS) -> list[Drain]:
    """Drain a router and a worker, `rounds` times each."""
    workers = [work.worker(f"gpu_worker-{i}") for i in (1, 2)]
    routers = [processes.router("router-1"), processes.router("router-2")]
    found = []
    async with LocalMesh(data_dir, [*routers, *workers]) as mesh:
        for number in range(rounds):
            found.append(await _drain(mesh, "router-1", mesh.urls[0], 2 * number, work))
            found.append(await _drain(mesh, "gpu_worker-1", mesh.urls[1], 2 * number + 1, work))
    return found


async def _drain(mesh: LocalMesh, victim: str, url: str, number: int, work: Work) -> Drain:
    drain = Drain(victim)
    requests = work.requests(IN_FLIGHT, number)
    async with Target([url], timeout_s=60) as target:
        sent = [asyncio.create_task(target.send(request)) for request in requests]
        await _accepted(mesh, IN_FLIGHT * (number + 1), work)
        port = mesh.health_port(victim) or 0
        at = time.monotonic()
        mesh.kill(victim, signal.SIGTERM)
        await probe.until_unready(port)
        drain.unready_s = time.monotonic() - at
        for answer in await asyncio.gather(*sent):
            _judge(drain, answer, work)
    drain.exit_code = await mesh.wait_end(victim, 60)
    drain.gone_s = time.monotonic() - at
    await mesh.restart(victim)
    return drain


async def _accepted(mesh: LocalMesh, count: int, work: Work) -> None:
    """Wait until the bus has admitted so many jobs since the mesh began."""
    async with asyncio.timeout(30):
        while await admitted(mesh, work.kind) < count:  # noqa: ASYNC110 - the bus has no event of it
            await asyncio.sleep(0.01)


def _judge(drain: Drain, answer: TargetAnswer, work: Work) -> None:
    code = answer.code or f"status {answer.status}"
    if answer.status == 200:
        code = work.flaw(answer)
    if not code:
        drain.whole += 1
        return
    drain.cut[code] = drain.cut.get(code, 0) + 1


def measure(rounds: int, work: Work = EMBEDDINGS) -> list[Drain]:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f4-") as folder:
        return asyncio.run(run(rounds, Path(folder), work))


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F4", sys.argv[1:]))
