"""`spillway keys` and `spillway dead-letters`, on a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cli import main
from common.bus import Bus, NewJob
from common.ids import Family, job_id, ulid
from common.registry.dead_letters import DeadLetters
from common.wire.jobs import EmbedWork
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import EmbedResult
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from tests.support.servers import Server

FAMILY = Family("embed.test")


@pytest.fixture(autouse=True)
def _at_server(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_REDIS_URL", redis_server.url)


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """A key is shown once, listed without its secret, rotated, revoked, and then unknown."""
    words = ["--tenant", "acme", "--requests-per-minute", "5"]
    assert main.main(["keys", "create", *words]) == 0
    text = capsys.readouterr().out.strip()
    key_id = text.split("-")[2]
    assert main.main(["keys", "list", "--json"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)[0]["requests_per_minute"] == 5
    assert text.split("-", 3)[3] not in shown
    assert main.main(["keys", "rotate", key_id]) == 0
    assert capsys.readouterr().out.strip() != text
    assert main.main(["keys", "revoke", key_id]) == 0
    assert main.main(["keys", "revoke", key_id]) == 1
    assert main.main(["keys", "rotate", key_id]) == 1
    assert "no key" in capsys.readouterr().err
    assert main.main(["keys", "create", "--tenant", "A b"]) == 2


async def _consumer(bus: Bus) -> Worker:
    name = incarnation_name("gpu")
    record = WorkerRecord(
        worker=name, classes=["gpu"], device="cpu", depth_items=100, depth_tokens=10_000, beta_s=0.1
    )
    consumer = Worker(bus, FAMILY, record)
    await consumer.start()
    return consumer


async def _convict(bus: Bus, consumer: Worker) -> str:
    """Let one job fail until it is convicted; return its id."""
    job = job_id(FAMILY, ulid())
    payload = encode(EmbedWork(fingerprint="f", tokens=[[1]]))
    until = bus.clock.now_ms() + 3_600_000
    admission = await bus.admission.admit(
        [NewJob(job, payload, 1, 1)], classes=("gpu",), router="r", tenant="acme", deadline_ms=until
    )
    assert admission.outcome == "admitted"
    try:
        async with asyncio.timeout(120):
            while not await DeadLetters(bus).all(FAMILY):
                for lease in await consumer.reader.read(10, 100):
                    await consumer.outbox.fail(
                        lease, "model_error", "it broke", "Traceback: line 1"
                    )
    except TimeoutError:
        lanes, living = await bus.lanes.use(FAMILY), await bus.workers.living(FAMILY)
        pytest.fail(f"not convicted: {await bus.jobs.get(job)}; lanes {lanes}; workers {living}")
    return job


async def test_dead_letters(bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    """A convicted job is listed, shown with its trace, replayed as a new one, and gone when that succeeds."""

    async def command(*words: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main.main, ["dead-letters", *words])
        return status, capsys.readouterr().out

    consumer = await _consumer(bus)
    job = await _convict(bus, consumer)
    assert job in (await command("list"))[1]
    status, shown = await command("show", job)
    assert status == 0
    assert "model_error: it broke" in shown
    assert "Traceback: line 1" in shown

    replay = asyncio.create_task(command("replay", job, "--timeout", "120"))
    states: list[Any] = []
    while not replay.done():
        for lease in await consumer.reader.read(10, 100):
            states.append(await bus.jobs.get(lease.job))
            result = EmbedResult(dimension=1, vectors=b"\0\0\0\0", tokens=1)
            await consumer.outbox.finish(lease, result)
    assert (await replay)[0] == 0
    assert states  # more than one where a slow machine lost the lease, and read the job again
    assert {state.replay_of for state in states if state is not None} == {job}
    assert (await command("list"))[1] == "no dead letters\n"
    await consumer.drain()
    await consumer.stop()


def test_dead_letters_that_do_not_exist() -> None:
    """An id of nothing is said to be nothing, an id that is none is refused."""
    assert main.main(["dead-letters", "show", job_id(FAMILY, ulid())]) == 1
    assert main.main(["dead-letters", "replay", "x"]) == 2
    assert main.main(["dead-letters", "list", "--family", "UPPER"]) == 2
