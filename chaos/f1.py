"""F1: every process is killed with SIGKILL, again and again, under a load of resumable requests.

`python -m chaos.f1 --kills 20 --seed S --json FILE`; what is found is kept in FILE.partial, so a run that
died, was interrupted or has used up its `--minutes` goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from spillway_client import SpillwayError

from bench.document import BenchOptions
from bench.mesh.local_mesh import LocalMesh
from chaos import stages
from chaos.chat_kinds import ChatKind
from chaos.clients import Clients, Done, name_of
from chaos.compare import Difference
from chaos.grounded import Grounded
from chaos.kinds import Kind
from chaos.leftovers import leftovers
from chaos.scenes import EMBEDDINGS, Scene
from chaos.stages import Stages
from chaos.tiers import TierCounts

RECOVER_S, BESIDE_S = 6.0, 2.0  # in all, and where another worker of the lane lives on the machine
HEAL_S = 90.0
OPEN = 5  # requests at least, at every kill
OPEN_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes: `kills` a process, or `total` over all of them; whether each waits for the last to heal.

    A client rests `rest_s` after each operation. `between` is how often a router is killed in each stage of a grounded
    request, after the last kill under load. A kill waits until `open` requests are open.
    """

    scene: Scene = EMBEDDINGS
    kills: int = 20
    seed: int = 1
    overlap: bool = False
    simulated: bool = False
    clients_a_kind: int = 2
    pause_s: tuple[float, float] = (0.2, 1.0)
    between: int = 0
    total: int | None = None
    rest_s: float = 0.02
    open: int = OPEN

    def order(self) -> list[str]:
        """Return the victims in the order they are killed: rounds over all, each shuffled."""
        rng, victims = random.Random(self.seed), self.scene.victims
        rounds = self.kills if self.total is None else -(-self.total // len(victims))
        return [name for _ in range(rounds) for name in rng.sample(victims, len(victims))][
            : self.total
        ]


@dataclass(slots=True)
class Kill:
    """One kill: seconds until the process was ready again, and until a request sent after it was answered.

    `healed_s` is the longest time for which a request open at the kill heard nothing: until its answer, or for a
    stream the longest pause after the kill; `slowest` is its key. It is to be `limit_s` at most, at best `goal_s`.
    """

    victim: str
    open_requests: int
    ready_s: float = 0.0
    healed_s: float = 0.0
    first_ok_s: float = 0.0
    limit_s: float = 0.0
    slowest: str = ""
    goal_s: float = 0.0


@dataclass(slots=True)
class Result:
    """What a run found, in `pieces` of `seconds` together; `wrong` is empty if every promise was kept."""

    kills: list[Kill] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)
    tries: int = 0
    repeated: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    sequences: int = 0
    differences: list[Difference] = field(default_factory=list)
    stages: Stages = field(default_factory=Stages)
    tiers: dict[str, int] = field(default_factory=dict)
    pieces: int = 0
    seconds: float = 0.0

    @property
    def late(self) -> list[Kill]:
        """Return the kills whose requests took longer than allowed."""
        return [kill for kill in self.kills if kill.healed_s > kill.limit_s > 0]


class Storm:
    """The load of one run: `clients_a_kind` loops for each kind, until stopped."""

    def __init__(self, clients: Clients, kinds: list[Kind], plan: Plan, first: int) -> None:
        self._clients = clients
        self._kinds = kinds
        self._plan = plan
        self._numbers = first
        self._stopping = asyncio.Event()
        self.done: list[Done] = []
        self.open: dict[str, Done] = {}
        self.wrong: list[str] = []

    async def run(self) -> None:
        """Ask until `stop()`, then end what is open."""
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                for _ in range(self._plan.clients_a_kind):
                    group.create_task(self._loop(kind))

    def stop(self) -> None:
        """Send nothing new."""
        self._stopping.set()

    @property
    def waiting(self) -> list[Done]:
        """Return the operations that wait for an answer now: a client between two turns waits for none."""
        return [done for done in self.open.values() if not done.pausing]

    async def until_open(self, count: int, ready: Callable[[Done], bool]) -> None:
        """Return at a moment at which `count` clients wait for answers that are `ready`; TimeoutError if none comes."""
        async with asyncio.timeout(OPEN_WITHIN_S):
            while sum(map(ready, self.waiting)) < count:  # noqa: ASYNC110 - a pause within an operation has no event
                await asyncio.sleep(0.001)

    async def _loop(self, kind: Kind) -> None:
        while not self._stopping.is_set():
            self._numbers += 1
            number = self._numbers
            done = Done(kind.name, f"f1-{kind.name}-{number}", time.monotonic())
            self.open[done.key] = done
            try:
                done.outcome = await kind.once(self._clients, number, done)
            except SpillwayError as error:
                done.outcome = name_of(error)
            done.done_s = time.monotonic()
            del self.open[done.key]
            self.done.append(done)
            if done.outcome != "ok":
                self.wrong.append(f"{done.key} after {done.tries} tries: {done.outcome}")
            await asyncio.sleep(self._plan.rest_s)


async def run(
    plan: Plan,
    data_dir: Path,
    partial: Path | None = None,
    enough: asyncio.Event | None = None,
    minutes: float | None = None,
) -> Result:
    """Run the plan on a mesh in `data_dir`; what `partial` holds is not done again.

    Once `enough` is set, or kills have gone on for `minutes`, no kill follows the one in progress; the run then ends
    as usual.
    """
    before, enough, began = read_partial(partial), enough or asyncio.Event(), time.monotonic()
    counts, scene = TierCounts(), plan.scene
    services = scene.services(plan.simulated)
    async with LocalMesh(data_dir, services, env=scene.env, supervise=True) as mesh:
        kinds = scene.kinds(plan.simulated)
        async with Clients(mesh.urls) as clients:
            for kind in kinds:
                await kind.prepare(clients)
            first = len(before.kills) * 1_000_000
            storm = Storm(clients, kinds, plan, first)
            kills: list[Kill] = []

            def so_far() -> Result:
                return _sum(before, kills, storm, kinds, clients)

            task = asyncio.create_task(storm.run())
            if minutes is not None:
                asyncio.get_running_loop().call_later(60 * minutes, enough.set)
            try:
                async for kill in _kill_all(plan, mesh, storm, counts, len(before.kills), enough):
                    kills.append(kill)
                    if partial is not None:
                        _keep(partial, so_far())
            finally:
                storm.stop()
                await task
            await _settle(mesh)
            wrong = [line for kind in kinds for line in await kind.audit(clients)]
            between = before.stages
            for kind in kinds:
                done = len(before.kills) + len(kills) == len(plan.order())
                if isinstance(kind, Grounded) and plan.between and done:
                    between = await stages.run(plan.between, mesh, clients, kind)
            result = so_far()
        result.tiers = dict(before.tiers)
        for key, value in (await counts.total(mesh)).items():
            result.tiers[key] = result.tiers.get(key, 0) + value
        result.stages = between
        result.wrong += wrong + between.wrong + await leftovers(mesh.redis_url)
    result.pieces, result.seconds = before.pieces + 1, before.seconds + time.monotonic() - began
    if partial is not None:
        _keep(partial, result)
    return result


def _sum(
    before: Result, kills: list[Kill], storm: Storm, kinds: list[Kind], clients: Clients
) -> Result:
    """Return what an interrupted run had found, with what this one has."""
    chats = [kind.comparison for kind in kinds if isinstance(kind, ChatKind)]
    now = Counter(done.kind for done in storm.done)
    return Result(
        kills=before.kills + kills,
        operations=dict(Counter(before.operations) + now),
        tries=before.tries + sum(done.tries for done in storm.done),
        repeated=dict(Counter(before.repeated) + clients.repeated),
        wrong=before.wrong + storm.wrong,
        sequences=before.sequences + sum(chat.sequences for chat in chats),
        differences=before.differences + [d for chat in chats for d in chat.differences],
        stages=before.stages,
        pieces=before.pieces,
        seconds=before.seconds,
    )


async def _kill_all(
    plan: Plan, mesh: LocalMesh, storm: Storm, counts: TierCounts, past: int, enough: asyncio.Event
) -> AsyncIterator[Kill]:
    rng = random.Random(plan.seed + past)
    for victim in plan.order()[past:]:
        if enough.is_set():
            return
        await mesh.wait_ready(victim, 90)
        await asyncio.sleep(rng.uniform(*plan.pause_s))
        await counts.keep(mesh, victim)
        await storm.until_open(plan.open, plan.scene.ready)
        if (stage := plan.scene.during.get(victim)) is not None:
            await stages.meet(mesh, victim, stage)
        if plan.overlap:
            mesh.kill(victim)
            yield Kill(victim, len(storm.waiting))
        else:
            yield await _kill(mesh, storm, victim, plan.scene)


async def _kill(mesh: LocalMesh, storm: Storm, victim: str, scene: Scene) -> Kill:
    was_open = storm.waiting
    at = time.monotonic()
    kill = Kill(victim, len(was_open))
    pid = mesh.kill(victim)
    await mesh.replaced(victim, pid, 90)
    kill.ready_s = time.monotonic() - at
    limit = time.monotonic() + HEAL_S
    while time.monotonic() < limit:
        later = [done.done_s for done in storm.done if done.sent_s > at and done.outcome == "ok"]
        if all(done.done_s for done in was_open) and later:
            kill.first_ok_s = min(later) - at
            break
        await asyncio.sleep(0.02)
    silences = [(done.silence_s(at) if done.done_s else HEAL_S, done.key) for done in was_open]
    kill.healed_s, kill.slowest = max(silences, default=(0.0, ""))
    kill.limit_s = RECOVER_S + (0.0 if victim in scene.another else kill.ready_s + 1.0)
    kill.goal_s = BESIDE_S if victim in scene.beside else kill.limit_s
    return kill


async def _settle(mesh: LocalMesh) -> None:
    for name in mesh.names():
        await mesh.wait_ready(name, 90)


def read_partial(partial: Path | None) -> Result:
    """Return what an interrupted run had found after its last kill; nothing if there was none."""
    if partial is None or not partial.exists():
        return Result()
    return msgspec.json.decode(partial.read_bytes(), type=Result)


def _keep(partial: Path, result: Result) -> None:
    fresh = partial.with_name(partial.name + ".new")
    fresh.write_bytes(msgspec.json.encode(result))
    fresh.replace(partial)


def measure(plan: Plan, options: BenchOptions) -> Result:
    """Run the plan in a directory of its own that is gone afterwards.

    Ctrl-C is `enough`, and so is the end of the options' minutes.
    """

    async def until_enough(folder: Path) -> Result:
        enough = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, enough.set)
        return await run(plan, folder, options.partial, enough, options.minutes)

    with tempfile.TemporaryDirectory(prefix="spillway-f1-") as folder:
        return asyncio.run(until_enough(Path(folder)))


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F1", sys.argv[1:]))
