"""The jobs that a request ran go soon after its result, unless somebody may still ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.bus import Bus, NewJob, Notifications
from common.ids import Family, job_id, ulid
from common.wire.message import encode
from common.wire.workflows import (
    ParcelsPlan,
    RequestResult,
    RequestWork,
    ResponseOptions,
    encode_plan,
)
from services.router.admission import request_store
from services.router.admission.queue import AdmissionQueue
from services.router.admission.request_store import RequestStore
from services.router.text.requests import Parcel
from services.router.workflows import runner
from services.router.workflows.workflow import Workflow
from tests.support.admission import admission_of, context_of
from tests.support.bus import EMBED, RESULT, WORK, Hand, must, open_bus
from tests.support.servers import Server

REQUEST = Family("request")
PLAN = encode_plan(
    ParcelsPlan(model="m", options=ResponseOptions(kind="embeddings", model="m"), parcels=[])
)


@pytest.fixture
async def bus(shared_redis: Server, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus on the shared server."""
    opened = await open_bus(shared_redis.url, str(tmp_path))
    yield opened
    await opened.close()


async def _two_stages(workflow: Workflow, _plan: object) -> RequestResult:
    """Run a stage whose results are read here, and one whose jobs make up the response."""
    parcels = [Parcel(WORK, 1, 10)] * 2
    await workflow.gather("known", [EMBED], ["gpu"], parcels)
    shown, _ = await workflow.gather("part", [EMBED], ["gpu"], parcels)
    return RequestResult(jobs=shown)


@pytest.mark.parametrize(("attached", "taken_over"), [(True, False), (False, False), (True, True)])
async def test_jobs_that_were_read_go_with_an_attached_request(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, *, attached: bool, taken_over: bool
) -> None:
    """Of a request that ends with its connection, jobs that only the router read are removed; its response's stay.

    If another router has taken the request over, that router needs all its jobs.
    """
    monkeypatch.setattr(runner, "perform", _two_stages)
    journal, store = Notifications(bus.connection, "r1"), RequestStore(bus)
    context = context_of(bus, journal, admission_of(bus, journal, AdmissionQueue(journal)))
    requests, hand = await Hand(bus, REQUEST, "r").join(), await Hand(bus, EMBED, "g").join()
    work = RequestWork(kind="parcels", tenant="t", body=PLAN, attached=attached)
    name = job_id(REQUEST, ulid(bus.clock.now_ms()))
    await must(bus, NewJob(name, encode(work), 1, 0), left_s=600, classes=("gpu",))
    (lease,) = await requests.pull()

    if taken_over:
        other = await Hand(bus, REQUEST, "r2").join()
        await requests.give_back([lease])
        (again,) = await other.take()
        assert again.job == name

    serving = asyncio.create_task(
        runner._ServedWorkflow(context, store, requests.parts, lease).run()
    )
    ran: list[str] = []
    async with asyncio.timeout(60):
        while not serving.done():
            for each in await hand.pull(4):
                assert await hand.finish(each, RESULT) == "ok"
                ran.append(each.job)
            await asyncio.sleep(0.01)
        await serving
    await journal.stop()

    async def left() -> set[str]:
        await store.sweep()
        return {job for job in (name, *ran) if await bus.jobs.get(job) is not None}

    assert await left() == {name, *ran}
    monkeypatch.setattr(request_store, "DELIVERED_S", -1.0)
    goes = attached and not taken_over
    stay = {name, *(job for job in ran if ".part." in job)} if goes else {name, *ran}
    assert await left() == stay
    assert len(ran) == 4
