"""What belongs to one thing and fails is begun again: a family's journal, a lease of which nothing could be told."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus import Bus, Notifications, keys
from common.ids import Family
from common.tasks import FIRST_PAUSE_S, RESTARTS, Supervisor
from tests.support.bus import RESULT, Hand, must, new_job


async def test_a_journals_reader_is_begun_again(
    bus: Bus, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in its midst the reader of a family's journal hears the ring it was at, after a pause."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    supervisor, before = Supervisor(pause=pause), RESTARTS._value.get()
    journal = Notifications(bus.connection, "r1", supervisor=supervisor)
    ring = journal._ring
    failed: list[Any] = []

    def rings(*args: Any) -> None:
        if not failed:
            failed.append(args)
            raise RuntimeError("boom")
        ring(*args)

    monkeypatch.setattr(journal, "_ring", rings)
    hand = await Hand(bus, family, "w").join()
    (job,) = await must(bus, new_job(family))
    bell = journal.bell(job.id, family)
    (lease,) = await hand.pull()
    await hand.finish(lease, RESULT)

    event = await bell.wait(60.0)
    bell.close()
    await journal.stop()

    assert event is not None
    assert event.kind == "result"
    assert pauses == [FIRST_PAUSE_S]
    assert RESTARTS._value.get() - before == 1


async def test_a_lease_let_go_is_tried_again(bus: Bus, family: Family) -> None:
    """A lease of which nothing could be told is found as a lost delivery and handed over: the job runs again."""
    hand = await Hand(bus, family, "w").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()

    hand.let_go(lease)
    assert not hand.held
    for _ in range(2):  # strange once may be on its way
        await hand.reconcile()

    assert await bus.lanes.pending(family, "gpu") == {keys.RETURNED: 1}
    (again,) = await hand.take()
    assert again.job == job.id
    assert await hand.finish(again, RESULT) == "ok"
