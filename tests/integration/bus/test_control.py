"""Messages to jobs: kept once by their number, bounded, gone with the job; the worker is told that they are there."""

from __future__ import annotations

import pytest

from common.bus import Bus, keys
from common.bus.control import MOST_BYTES, MOST_MESSAGES
from common.ids import Family
from common.wire.control import Extend, Pause
from tests.support.bus import RESULT, Hand, must, new_job


async def test_messages(bus: Bus, family: Family) -> None:
    """The first of each number is kept, for a queued job too; what was taken is gone and stays known."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    after = await bus.control.last(family)
    two, one = Extend(number=2, tokens=[5]), Extend(number=1, start=3, removed=2, note=b"n")
    assert [await bus.control.send(job.id, each) for each in (two, one)] == ["sent"] * 2
    assert await bus.control.send(job.id, Extend(number=2, tokens=[6])) == "known"
    assert await bus.control.state(job.id) == ([one, two], False)
    after, names = await bus.control.named(family, after)
    assert names == [job.id] * 2
    (lease,) = await hand.pull()
    await bus.control.taken(job.id, 1)
    assert await bus.control.send(job.id, one) == "known"
    assert await bus.control.state(job.id) == ([two], False)
    ttl = await bus.connection.call("PTTL", keys.control(job.id))
    assert ttl > await bus.connection.call("PTTL", keys.inbox(family)) > 0
    assert await hand.finish(lease, RESULT) == "ok"
    assert await bus.control.send(job.id, Extend(number=3)) == "over"
    assert await bus.control.send(new_job(family).id, Pause()) == "unknown"
    assert await bus.control.named(family, after) == (after, [])


async def test_pauses(bus: Bus, family: Family) -> None:
    """A job is paused until it is resumed, or extended; to say the same again changes nothing, and wakes nobody."""
    await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    said = [
        (await bus.control.send(job.id, Pause(resume=resume)), await bus.control.state(job.id))
        for resume in (True, False, False, True, False)
    ]
    assert [verdict for verdict, _ in said] == ["known", "sent", "known", "sent", "sent"]
    assert [state.paused for _, state in said] == [False, True, True, False, True]
    assert await bus.control.send(job.id, Extend(number=1)) == "sent"
    assert not (await bus.control.state(job.id)).paused
    _, names = await bus.control.named(family, "0-0")
    assert names == [job.id] * 4


async def test_bounds(bus: Bus, family: Family) -> None:
    """So many messages, and of such a size, and no more; those that were taken make room."""
    await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    for number in range(1, MOST_MESSAGES + 1):
        assert await bus.control.send(job.id, Extend(number=number)) == "sent"
    assert await bus.control.send(job.id, Extend(number=MOST_MESSAGES + 1)) == "full"
    assert await bus.control.send(job.id, Pause()) == "sent"
    await bus.control.taken(job.id, 2)
    assert await bus.control.send(job.id, Extend(number=MOST_MESSAGES + 1)) == "sent"
    for message in (Extend(number=0), Extend(number=99, tokens=[300] * MOST_BYTES)):
        with pytest.raises(ValueError, match="expected a number"):
            await bus.control.send(job.id, message)


async def test_a_cancel_wakes_the_worker(bus: Bus, family: Family) -> None:
    """A running job that is cancelled is named in the inbox: its worker may have no step to learn it from."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    await hand.pull()
    assert await bus.control.cancel(job.id) == "flagged"
    assert (await bus.control.named(family, "0-0"))[1] == [job.id]
