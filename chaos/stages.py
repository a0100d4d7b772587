"""F1, grounded requests: the router that drives one is killed in each of its stages, and another goes on.

A stage is held by stopping the processes that do it, so the kill meets it for certain.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import Literal

import redis.asyncio

from bench.mesh.local_mesh import LocalMesh
from chaos.clients import Clients
from chaos.grounded import Grounded
from loadgen.chat.answer import StreamedAnswer

Stage = Literal["embed", "search", "generate", "later search"]
# The kill of a generation waits for its first token instead: its worker must run.
HELD: dict[Stage, str] = {"embed": "gpu_worker", "search": "vector_search", "generate": ""}
VICTIM = "router-1"
WITHIN_S = 30.0
# The keys of a stage's jobs. Those of an answer's later retrievals have the number of theirs in their names.
_KEYS: dict[Stage, str] = {
    "embed": "{embed[./]*:job:*", "search": "{search[./]*:job:*", "generate": "{generate[./]*:job:*",
    "later search": "{search[./]*:job:*.r*search.*",
}  # fmt: skip


@dataclass(slots=True)
class StageKill:
    """One router killed while a grounded request was in `stage`; seconds until its client had the answer, and
    what was wrong with it ("ok": nothing).
    """

    stage: Stage
    outcome: str
    answered_s: float


@dataclass(slots=True)
class Stages:
    """All kills of a run, and how many answers were compared."""

    kills: list[StageKill] = field(default_factory=list)
    sequences: int = 0

    @property
    def wrong(self) -> list[str]:
        """Return what broke a promise."""
        return [
            f"killed in {kill.stage}: {kill.outcome}" for kill in self.kills if kill.outcome != "ok"
        ]


async def run(rounds: int, mesh: LocalMesh, clients: Clients, kind: Grounded) -> Stages:
    """Kill a router `rounds` times in every stage, one request at a time; the mesh must be quiet and supervised."""
    found, before = Stages(), kind.comparison.sequences
    for number in range(rounds):
        for stage in HELD:
            found.kills.append(await _kill(mesh, clients, kind, stage, number))
    found.sequences = kind.comparison.sequences - before
    return found


async def meet(mesh: LocalMesh, name: str, stage: Stage) -> None:
    """Stop a process, and return once a new job of a stage is there, which waits for it; TimeoutError if none comes."""
    before = await _jobs(mesh, stage)
    mesh.kill(name, signal.SIGSTOP)
    async with asyncio.timeout(WITHIN_S):
        await _until_new(mesh, stage, before)


async def _kill(
    mesh: LocalMesh, clients: Clients, kind: Grounded, stage: Stage, number: int
) -> StageKill:
    held = [name for name in mesh.services if HELD[stage] and name.startswith(HELD[stage])]
    body, known = kind.pool[number % len(kind.pool)]
    streaming = asyncio.Event()

    def seen(answer: StreamedAnswer) -> None:
        if answer.last is not None:
            streaming.set()

    before = await _jobs(mesh, stage)
    for name in held:
        mesh.kill(name, signal.SIGSTOP)
    key = f"stage-{stage}-{number}"
    task = asyncio.create_task(clients.chat.ask(body, key=key, first=0, seen=seen))
    try:
        async with asyncio.timeout(WITHIN_S):
            await (streaming.wait() if stage == "generate" else _until_new(mesh, stage, before))
        pid, at = mesh.kill(VICTIM), time.monotonic()
    finally:
        for name in held:
            mesh.kill(name, signal.SIGCONT)
    answer = await task
    ended_s = time.monotonic() - at
    await mesh.replaced(VICTIM, pid, 90)
    return StageKill(stage, kind.comparison.judge(key, known, answer), ended_s)


async def _until_new(mesh: LocalMesh, stage: Stage, before: set[str]) -> None:
    while not await _jobs(mesh, stage) - before:  # noqa: ASYNC110 - the bus has no event of it
        await asyncio.sleep(0.005)


async def _jobs(mesh: LocalMesh, stage: Stage) -> set[str]:
    """Return the jobs of a stage that the bus knows."""
    client = redis.asyncio.from_url(mesh.redis_url, decode_responses=True)
    try:
        keys = client.scan_iter(match=_KEYS[stage], count=1000)
        return {str(key) async for key in keys}
    finally:
        await client.aclose()
