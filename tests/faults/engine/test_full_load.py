"""Full load for long, with every tier of pages: streams cancelled, out of time and stopped at random.

Every text is the one it has alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.engine import random_models
from bench.mesh import proc
from common.bus import Bus, Notifications
from common.bus.admission import Terms
from common.config import Common
from common.ids import Family, job_id, ulid
from common.registry.dead_letters import DeadLetters
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from common.wire.results import Piece
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits
from tests.conftest import PROFILE
from tests.faults.engine.test_failover import live, process
from tests.support.engine import Desk, running, text_of, tokens_of
from tests.support.servers import Server, free_port
from tests.support.waiting import until

SOAK = PROFILE == "soak"
REQUESTS = 50_000 if SOAK else 300
PROMPTS, AT_ONCE = 40, 48
# Of the worker: fewer pages than are asked for, so that some wait and some are preempted, and few more on the host.
RUNNING, PAGES, HOST_PAGES = 16, 24, 40
GROWTH_BYTES = 16 << 20


class Alone(NamedTuple):
    """What a request gives when nothing else runs."""

    work: GenerateWork
    tokens: list[int]
    text: str


def works(fingerprint: str, draw: random.Random) -> list[GenerateWork]:
    """Return requests of all lengths, most of them greedy, with shared beginnings and stops that may come."""
    head = [draw.randrange(3, random_models.VOCABULARY) for _ in range(100)]
    return [
        GenerateWork(
            fingerprint=fingerprint,
            scope="t",
            prompts=[
                head[: draw.choice([0, 35, 100])]
                + [draw.randrange(3, random_models.VOCABULARY) for _ in range(draw.randint(1, 150))]
            ],
            max_new=draw.randint(1, 90),
            sampling=SamplingParams(temperature=0.0 if number % 4 else 0.8, seed=number),
            stop_ids=[draw.randrange(3, random_models.VOCABULARY) for _ in range(2)],
        )
        for number in range(PROMPTS)
    ]


async def one(desk: Desk, expected: Alone, draw: random.Random) -> str:
    """Send one request, let it run, cancel it, or give it little time; return how it ended."""
    way = draw.choice(["run", "run", "cancel", "hurry"])
    seconds = draw.uniform(0.02, 0.5) if way == "hurry" else 300.0
    job = job_id(desk.family, ulid())
    # Half of the requests in a hurry are admitted, however late their predicted end is.
    terms = Terms(rule="all") if way == "hurry" and draw.random() < 0.5 else None
    admission = await desk.ask(job, expected.work, seconds=seconds, terms=terms)
    if admission.outcome != "admitted":
        assert (way, admission.reason) == ("hurry", "deadline"), admission
        return "refused"
    if way == "cancel":
        await asyncio.sleep(draw.uniform(0.0, 0.2))
        await desk.bus.control.cancel(job)
    event = await desk.end(job)
    pieces: Sequence[Piece] = await desk.pieces(job)
    tokens, text = tokens_of(pieces), text_of(pieces)
    if event.kind == "result":
        assert (tokens, text) == (expected.tokens, expected.text)
    else:
        assert way != "run", event
        assert tokens == expected.tokens[: len(tokens)]
        assert expected.text.startswith(text)
    return event.kind


@pytest.mark.timeout(0 if SOAK else 120)
async def test_full_load(
    bus: Bus, config: Common, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays flat, nothing is left behind, and whatever ran beside it, a stream is what it is alone."""
    draw, model = random.Random(seed), tmp_path / "m"
    print(f"seed {seed}")
    random_models.write(model, "llama", random_models.settings("llama", 1))
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    family = Family("chat.m")
    desk = Desk(bus, journal, family)
    solo = TorchExecutor.load(str(model), device="cpu", dtype="fp32", threads=1, kv_bytes=8 << 20)
    alone = []
    async with running(bus, solo, bounds=StepLimits(512, 1)):
        for work in works(solo.fingerprint, draw):
            pieces, _ = await desk.result(await desk.admit(work))
            alone.append(Alone(work, tokens_of(pieces), text_of(pieces)))

    port = free_port()
    monkeypatch.setenv("SPILLWAY_MAX_RUNNING", str(RUNNING))
    flags: tuple[str, ...] = ("--embed-model", "none", "--chat-model", str(model))
    flags += (
        "--chat-dtype",
        "fp32",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--health-port",
        str(port),
    )
    each = sum(solo.shape.page_bytes)
    flags += ("--kv-bytes", str(PAGES * each), "--host-kv-bytes", str(HOST_PAGES * each))
    ends, rss = Counter[str](), []
    pages = Server().start()
    monkeypatch.setenv("SPILLWAY_PAGES_URL", pages.url)
    monkeypatch.setenv("SPILLWAY_PAGE_PUBLISH", "through")
    with contextlib.closing(pages), process(config, *flags) as worker:
        await live(bus, family, 1)

        async def client(number: int) -> None:
            mine = random.Random(seed * 1000 + number)
            for _ in range(REQUESTS // AT_ONCE):
                ends[await one(desk, mine.choice(alone), mine)] += 1
                if sum(ends.values()) % (REQUESTS // 3) == 0:
                    rss.append(proc.rss_bytes(worker.pid))

        async with asyncio.TaskGroup() as clients:
            for number in range(AT_ONCE):
                clients.create_task(client(number))
        held = await until_free(port)
        rss.append(proc.rss_bytes(worker.pid))
    await journal.stop()
    print(dict(ends), [round(each / 1e6, 1) for each in rss])

    assert min(ends[kind] for kind in ("result", "cancelled", "expired")) > 0
    assert held["spillway_preemptions_total"] > 0
    assert held['spillway_pages_found_total{tier="host"}'] > 0
    assert held['spillway_page_move_bytes_total{move="put"}'] > 0
    assert not any(count for name, count in held.items() if "unsound_pages_total" in name)
    assert rss[-1] - rss[0] < GROWTH_BYTES
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}
    assert await DeadLetters(bus).all(family) == []


async def until_free(port: int) -> dict[str, float]:
    """Return the worker's metrics, once it holds no sequence and no page of one, which the last step gives back."""
    found: dict[str, float] = {}

    async def free() -> bool:
        url = f"http://127.0.0.1:{port}/metrics"
        told = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        lines = (line.rpartition(" ") for line in told.splitlines() if line[0] != "#")
        found.update({name: float(value) for name, _, value in lines})
        names = ("running_sequences", "waiting_sequences", 'pages{state="used",tier="device"}')
        return not any(found[f"spillway_{name}"] for name in names)

    await until(free, "the worker holds no sequence and no page of one")
    return found
