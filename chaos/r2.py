"""R2: many routers admit while workers finish, change their depth and die; use must never exceed depth.

`python -m chaos.r2 --kills ADMISSIONS --seed S --json FILE`; FILE.partial keeps the counts of an
interrupted run. Every admission is judged by the router that made it; beside that, an auditor compares use with the
streams' content, atomically, some fifty times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis.asyncio

from bench import ROOT
from bench.mesh import proc
from bench.mesh.local_mesh import LocalMesh
from chaos.r2_role import CLASSES, FAMILY, Tally

ROUTERS = 4
WORKERS = 3
AUDIT = """
local wrong = {}
for i = 1, #ARGV do
  local items, tokens = 0, 0
  for _, e in ipairs(redis.call('XRANGE', KEYS[i + 1], '-', '+')) do
    for n = 1, #e[2], 2 do
      if e[2][n] == 'i' then items = items + tonumber(e[2][n + 1]) end
      if e[2][n] == 'n' then tokens = tokens + tonumber(e[2][n + 1]) end
    end
  end
  local held = redis.call('HMGET', KEYS[1], ARGV[i] .. ':items', ARGV[i] .. ':tokens')
  if tonumber(held[1] or '0') ~= items or tonumber(held[2] or '0') ~= tokens then
    wrong[#wrong + 1] = ARGV[i] .. ' use ' .. tostring(held[1]) .. '/' .. tostring(held[2])
      .. ' streams ' .. items .. '/' .. tokens
  end
end
return wrong
"""


@dataclass(slots=True)
class Found:
    """Decisions counted, violations, audits, and how often each thing was done to the processes."""

    admitted: int = 0
    refused: int = 0
    over: list[str] = field(default_factory=list)
    audits: int = 0
    differ: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Arena:
    """The processes of one run, replaced as they are killed."""

    def __init__(self, mesh: LocalMesh, folder: Path, seed: int) -> None:
        self.mesh = mesh
        self.rng = random.Random(seed)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.faults: dict[str, int] = {}
        self._folder = folder
        self._tallies = 0
        self._resumes: set[asyncio.Task[None]] = set()

    async def start(self, role: str, number: int) -> None:
        """Start router or worker `number` (again)."""
        self._tallies += 1
        argv = [role, "--redis", self.mesh.redis_url, "--seed", str(number)]
        argv += ["--tally", str(self._folder / f"{self._tallies}.tally")]
        with (self._folder / f"{role}-{number}.log").open("ab") as log:
            self.processes[f"{role}-{number}"] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "chaos.r2_role",
                *argv,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                preexec_fn=proc.die_with_parent,
            )

    async def hurt(self) -> None:
        """Do one thing: kill a process and start it again, stop one for longer than its lease, or kill Redis."""
        name = self.rng.choice(sorted(self.processes))
        what = self.rng.choices(("kill", "stop", "redis"), (8, 2, 1))[0]
        process = self.processes[name]
        if what == "redis":
            await self.mesh.restart("redis")
        elif what == "stop" and name.startswith("worker"):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGSTOP)
            task = asyncio.create_task(self._resume(process))
            self._resumes.add(task)
            task.add_done_callback(self._resumes.discard)
        else:
            what = f"kill {name.partition('-')[0]}"
            await _kill(process)
            role, _, number = name.partition("-")
            await self.start(role, int(number))
        self.faults[what] = self.faults.get(what, 0) + 1

    async def _resume(self, process: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(8.0)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        """Kill what is left."""
        for task in self._resumes:
            task.cancel()
        for process in self.processes.values():
            await _kill(process)

    def count(self, found: Found) -> None:
        """Add up all tallies into `found`; a torn last line of a killed router does not count."""
        found.admitted, found.refused, found.over = 0, 0, []
        for path in self._folder.glob("*.tally"):
            for line in path.read_bytes().split(b"\n")[:-1]:
                tally = msgspec.json.decode(line, type=Tally)
                found.admitted += tally.admitted
                found.refused += tally.refused
                found.over += tally.over


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def run(admissions: int, seed: int, folder: Path, before: Found) -> Found:
    """Go on until `admissions` were made, those of `before` included."""
    found = Found()
    began = time.monotonic()
    async with LocalMesh(folder, [], maxmemory="6gb") as mesh:
        arena = Arena(mesh, folder, seed + before.admitted)
        enough = asyncio.Event()
        auditor = asyncio.create_task(_audit(mesh.redis_url, found, enough))
        try:
            for number in range(ROUTERS):
                await arena.start("router", number)
            for number in range(WORKERS):
                await arena.start("worker", number)
            while True:
                await asyncio.sleep(1.0)
                arena.count(found)
                if before.admitted + found.admitted >= admissions:
                    break
                if arena.rng.random() < 0.3:
                    await arena.hurt()
        finally:
            enough.set()  # no cancel: redis-py may turn one into an error of the connection
            await auditor
            await arena.end()
        arena.count(found)
    found.faults, found.seconds = arena.faults, time.monotonic() - began
    return _sum(before, found)


async def _audit(url: str, found: Found, enough: asyncio.Event) -> None:
    keys = [f"{{{FAMILY}}}:use", *(f"{{{FAMILY}}}:lane:{cls}" for cls in CLASSES)]
    client = redis.asyncio.from_url(url, decode_responses=True)
    try:
        while not enough.is_set():
            await asyncio.sleep(0.02)
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                found.differ += await client.eval(AUDIT, len(keys), *keys, *CLASSES)
                found.audits += 1
    finally:
        await client.aclose()


def _sum(one: Found, two: Found) -> Found:
    faults = {k: one.faults.get(k, 0) + two.faults.get(k, 0) for k in one.faults | two.faults}
    return Found(
        one.admitted + two.admitted, one.refused + two.refused, one.over + two.over,
        one.audits + two.audits, one.differ + two.differ, faults, one.seconds + two.seconds,
    )  # fmt: skip


def measure(admissions: int, seed: int, partial: Path | None = None) -> Found:
    """Run in directories of their own, in parts, so that an interrupted run loses a part at most."""
    found = Found()
    if partial is not None and partial.exists():
        found = msgspec.json.decode(partial.read_bytes(), type=Found)
    while found.admitted < admissions:
        goal = min(admissions, found.admitted + 25_000)
        with tempfile.TemporaryDirectory(prefix="spillway-r2-") as folder:
            found = asyncio.run(run(goal, seed, Path(folder), found))
        if partial is not None:
            partial.write_bytes(msgspec.json.encode(found))
        print(f"R2: {found.admitted} admissions, {len(found.over)} over depth", flush=True)
    return found


if __name__ == "__main__":
    from chaos.command import main

    sys.exit(main("R2", sys.argv[1:]))
