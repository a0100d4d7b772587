"""Answers bound to schemas while their workers are killed: all end, and all that were not cut off are valid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from common.bus import Bus, Notifications
from common.config import Common
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from common.registry.models import Models
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from tests.faults.engine.test_failover import live, process
from tests.support.engine import Desk, text_of
from tests.support.schema_runs import DEMO, schema
from tests.support.schemas import SCHEMAS, faults_of

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"
# 10,000 in the soak, in parts that fit into an hour each, so that a run goes on with those that are left.
PARTS, ANSWERS, TOGETHER = (10, 1000, 32) if SOAK else (1, 16, 8)
KILL_EVERY = 50 if SOAK else 8  # answers, about
FAMILY = Family("chat.spillway-demo")
FLAGS = (
    "--embed-model",
    "none",
    "--chat-model",
    DEMO,
    "--threads",
    "1",
    "--device",
    "cpu",
    "--chat-dtype",
    "fp32",
)


class Scene:
    """Two workers, one of which is killed now and then and started again, and answers that are asked of them."""

    def __init__(self, config: Common, desk: Desk, rng: random.Random) -> None:
        self.desk, self.rng, self.fingerprint = desk, rng, ""
        self.ends: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, list[str]]] = []
        self.kills = 0
        half = KILL_EVERY // 2  # a worker takes over before it is killed itself
        self._kill_at = {
            begin + half + rng.randint(1, half) for begin in range(0, ANSWERS, KILL_EVERY)
        }
        self._config = config
        self._running = ExitStack()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        """Start workers."""
        for name in names:
            made = process(self._config, *FLAGS, "--instance", name)
            self._workers[name] = self._running.enter_context(made)

    def close(self) -> None:
        """End all workers."""
        self._running.close()

    async def answer(self, limit: asyncio.Semaphore) -> None:
        """Ask for an answer of a schema drawn at random, and judge it."""
        async with limit:
            name = self.rng.choice(sorted(SCHEMAS))
            asked = GenerateWork(
                fingerprint=self.fingerprint,
                scope="t",
                prompts=[[self.rng.randrange(300, 1500) for _ in range(20)]],
                max_new=400,
                stop_ids=[2],
                sampling=SamplingParams(seed=self.rng.getrandbits(60), frequency=0.1),
                grammar=schema(SCHEMAS[name]),
            )
            pieces, _ = await self.desk.result(await self.desk.admit(asked))
            (finish,) = [piece.finish for piece in pieces if piece.finish]
            self.ends[str(finish)] += 1
            text = text_of(pieces)
            if finish == "stop" and (faults := faults_of(SCHEMAS[name], text)):
                self.wrong.append((name, text, faults))
            if sum(self.ends.values()) in self._kill_at:
                await self.kill()

    async def kill(self) -> None:
        """Kill one of the workers, and start another one in its place."""
        name = self.rng.choice(sorted(self._workers))
        self._workers.pop(name).send_signal(signal.SIGKILL)
        self.kills += 1
        self.start(f"{name[0]}{self.kills}")


@pytest.mark.timeout(0 if SOAK else 120)
@pytest.mark.parametrize("part", range(PARTS))
async def test_bound_answers_survive_their_workers(
    bus: Bus, config: Common, seed: int, part: int, record: Callable[[str, object], None]
) -> None:
    """Workers are killed amid answers: each goes on from its log, under the same grammar, to a valid end."""
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    rng = random.Random(f"{seed} {part}")
    with contextlib.closing(Scene(config, Desk(bus, journal, FAMILY), rng)) as scene:
        scene.start("a", "b")
        await live(bus, FAMILY, 2)
        card = (await Models(bus).cards())["spillway-demo"]
        assert card.grammars
        scene.fingerprint = card.fingerprint
        limit = asyncio.Semaphore(TOGETHER)
        async with asyncio.TaskGroup() as group:
            for _ in range(ANSWERS):
                group.create_task(scene.answer(limit))
    await journal.stop()
    assert scene.wrong == []
    assert sum(scene.ends.values()) == ANSWERS
    assert scene.ends["length"] <= (0.05 if SOAK else 0.25) * ANSWERS
    assert scene.kills == ANSWERS // KILL_EVERY
    assert await DeadLetters(bus).all(FAMILY) == []
    record("answers", ANSWERS)
    record("cut off", scene.ends["length"])
    record("kills", scene.kills)
