"""Extended generations that survive: workers killed after an extension, and while a generation waits for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.engine import random_models
from common.bus import Bus, Notifications
from common.config import Common
from common.ids import Family
from common.registry.models import Models
from common.types.generation import SamplingParams
from common.wire.control import Extend, ExtensionRule
from common.wire.jobs import GenerateWork
from tests.faults.engine.test_failover import live, process
from tests.integration.engine.test_control import applied
from tests.support.engine import Desk, text_of, tokens_of

RULE = ExtensionRule(every=16, most=3)
EXTENSIONS = [
    Extend(number=number, start=70, removed=20, tokens=[10 * number + at for at in range(length)])
    for number, length in ((1, 30), (2, 50), (3, 10))
]


def placed(extensions: list[Extend]) -> list[Extend]:
    """Return extensions whose tokens, and a passage before them, are computed alone."""
    return [
        replace(each, spans=[(20, 60), (each.start, each.start + len(each.tokens))])
        for each in extensions
    ]


@pytest.mark.parametrize("precomputed", [False, True])
async def test_killed_workers(
    bus: Bus, config: Common, tmp_path: Path, *, precomputed: bool
) -> None:
    """kill -9 of the holder while it waits, and after an extension: tokens, text and extensions of the undisturbed run.

    The model is real, and draws with a seed and penalties. Precomputed passages are in one worker's store and not in
    another's.
    """
    extensions = placed(EXTENSIONS) if precomputed else EXTENSIONS
    random_models.write(tmp_path / "m", "llama", random_models.settings("llama", 1))
    flags: tuple[str, ...] = ("--embed-model", "none", "--chat-model", str(tmp_path / "m"))
    flags += ("--threads", "1", "--device", "cpu", "--kv-bytes", str(4 << 20))
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    family = Family("chat.m")
    with (
        process(config, *flags, "--instance", "a") as one,
        process(config, *flags, "--instance", "b") as two,
        process(config, *flags, "--instance", "c") as three,
    ):
        await live(bus, family, 3)
        processes = {each.pid: each for each in (one, two, three)}
        pids = {record.worker: record.pid for record in await bus.workers.living(family)}

        async def kill_the_holder() -> None:
            (holder,) = await bus.lanes.pending(family, "gpu")
            processes[pids[holder]].kill()

        desk = Desk(bus, journal, family)
        asked = GenerateWork(
            fingerprint=(await Models(bus).cards())["m"].fingerprint,
            scope="t",
            prompts=[[5, 6, 7, 8] * 25],
            max_new=250,
            sampling=SamplingParams(temperature=0.8, repetition=1.2, frequency=0.3, seed=9),
            extensions=RULE,
            spans=[(20, 60), (70, 95)] if precomputed else [],
        )
        calm = await desk.admit(asked)
        for extension in extensions:
            await bus.control.send(calm, extension)
        expected, _ = await desk.result(calm)

        job = await desk.admit(asked)
        await bus.control.send(job, extensions[0])
        await desk.until(job, 32)  # it waits for the second one
        await kill_the_holder()
        await bus.control.send(job, extensions[1])
        before = await desk.until(
            job, 48
        )  # another worker took the second one, and waits for the third
        for extension in (*extensions[:2], extensions[2]):  # as a router does that takes over
            await bus.control.send(job, extension)
        await desk.until(job, 50)
        await kill_the_holder()
        found, result = await desk.result(job)
    await journal.stop()
    assert found[: len(before)] == before
    assert tokens_of(found) == tokens_of(expected)
    assert text_of(found) == text_of(expected)
    assert result.completion_tokens == 250
    for each in (calm, job):
        took = [(one.tokens, one.extension) for one in await applied(desk, each)]
        assert took == [(16, extensions[0]), (32, extensions[1]), (48, extensions[2])]
