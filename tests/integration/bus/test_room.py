"""The word that room appeared: every way in which a lane may get room wakes who was refused and asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.bus import Bus, Notifications, keys
from common.errors import NotFound
from common.ids import Family
from tests.support.bus import RESULT, Hand, admit, must, new_job, outcome, reached


@pytest.fixture
async def words(bus: Bus, family: Family) -> AsyncIterator[asyncio.Queue[Family]]:
    """The families in which a router hears that room appeared."""
    journal, heard = Notifications(bus.connection, "r1"), asyncio.Queue[Family]()
    journal.on_room = heard.put_nowait
    journal.listen(family)
    yield heard
    await journal.stop()


async def _refused(bus: Bus, family: Family, *, waits: bool = True) -> None:
    said = await admit(bus, new_job(family), waits=waits)
    assert said.outcome == "refused", said


async def _finish(hand: Hand, job: str) -> None:
    (lease,) = await hand.pull()
    assert await hand.finish(lease, RESULT) == "ok"


async def _cancel(hand: Hand, job: str) -> None:
    assert await hand.bus.control.cancel(job) == "removed"


async def _refuse(hand: Hand, job: str) -> None:
    (lease,) = await hand.pull()
    assert await hand.refuse(lease, NotFound("no such thing")) == "ok"


async def _convict(hand: Hand, job: str) -> None:
    await hand.bus.connection.call("HSET", keys.job(job), "errors", 2)
    (lease,) = await hand.pull()
    assert await hand.fail(lease, "boom", "it failed") == "dead"


async def _expire(hand: Hand, job: str) -> None:
    await hand.bus.connection.call(
        "HSET", keys.job(job), "deadline", hand.bus.clock.now_ms() - 1000
    )
    (lease,) = await hand.pull()
    await hand.die()
    await hand.give_back([lease])
    assert (await outcome(hand.bus, job)).kind == "expired"


async def _start(hand: Hand, job: str) -> None:
    await Hand(hand.bus, hand.family, "g2").join()


@pytest.mark.parametrize("way", [_finish, _cancel, _refuse, _convict, _expire, _start])
async def test_room_is_told(
    bus: Bus, family: Family, words: asyncio.Queue[Family], way: Any
) -> None:
    """Whatever ends a job, or starts a worker, is told to the routers that were refused, once."""
    hand = await Hand(bus, family, "g1", items=1).join()
    (job,) = await must(bus, new_job(family))
    await _refused(bus, family)
    await _refused(bus, family)
    await way(hand, job.id)
    async with asyncio.timeout(60):
        assert await words.get() == family
    assert await bus.connection.call("XLEN", keys.room(family)) == 1
    assert words.empty()


async def test_a_worker_that_starts_wakes_who_found_none(
    bus: Bus, family: Family, words: asyncio.Queue[Family]
) -> None:
    """An admission that found no worker is woken by the first that starts."""
    await _refused(bus, family)
    await Hand(bus, family, "g1").join()
    async with asyncio.timeout(60):
        assert await words.get() == family


async def test_room_of_a_dead_workers_lane(
    bus: Bus, family: Family, words: asyncio.Queue[Family]
) -> None:
    """What a dead worker's own lane held goes to the shared one, and the room it leaves is told."""
    dead = await Hand(bus, family, "g1", items=1).join()
    helper = await Hand(bus, family, "g2", items=1).join()
    await must(bus, new_job(family), prefer="g1")
    await must(bus, new_job(family), prefer="g2")
    await _refused(bus, family)
    await dead.die()
    reached(bus)
    await bus.recovery.settle_own_lane(family, "g1", "g2", "gpu")
    async with asyncio.timeout(60):
        assert await words.get() == family
    assert len(await helper.pull()) == 1


async def test_nothing_is_written_while_nobody_waits(bus: Bus, family: Family) -> None:
    """Without a refused admission that waits, the end of a job writes no word; after a word the next needs another."""
    hand = await Hand(bus, family, "g1", items=1).join()
    for waits in (False, True):
        (job,) = await must(bus, new_job(family))
        await _refused(bus, family, waits=waits)
        await _finish(hand, job.id)
        assert await bus.connection.call("EXISTS", keys.room(family)) == int(waits)
    (job,) = await must(bus, new_job(family))
    before = await bus.connection.call("XRANGE", keys.room(family), "-", "+")
    await _finish(hand, job.id)
    assert await bus.connection.call("XRANGE", keys.room(family), "-", "+") == before
    assert 0 < await bus.connection.call("PTTL", keys.room(family)) <= 60_000
