"""Data in the layout of one family a shard is moved, whatever step the move is ended at."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus import Bus, keys
from common.bus.former import adopt_former, remove_former
from common.ids import Family
from common.wire.message import encode
from common.wire.search import Document, Write
from tests.support.bus import Hand, matching, must, new_job, outcome

TAG = "{search.c1/0}"


class Killed(BaseException):
    """The process ended here."""


def _write(name: str) -> bytes:
    document = Document(id=name, hash="h", chunks=[])
    return encode(Write(request=name, index=0, router="r1", upserts=[document]))


async def _fill(bus: Bus, ids: list[str]) -> None:
    """Write what the last version left, by literal commands."""
    for entry in ids:
        await bus.connection.call("XADD", f"{TAG}:writes", entry, "w", _write(entry))
    await bus.connection.call("HSET", f"{TAG}:applied", "r-1", ids[2], "r-2", ids[1])
    await bus.connection.call("HSET", f"{TAG}:snapshots", "r-1", ids[0])
    await bus.connection.call("SET", f"{TAG}:blocked", "disk_full", "PX", 60_000)
    await bus.connection.call("HSET", f"{TAG}:use", "cpu:items", 0, "cpu:tokens", 0)


async def _ids(bus: Bus) -> list[str]:
    rows = await bus.writes.read({("c1", 0): "0-0"})
    assert all(isinstance(write, Write) and write.request == entry for *_, entry, write in rows)
    return [entry for _, _, entry, _ in rows]


async def _former_keys(bus: Bus) -> list[str]:
    return await matching(bus, "{search.c1/*")


def _ids_of(count: int) -> list[str]:
    return [f"{1000 + number}-{number % 3}" for number in range(count)]


async def test_everything_is_moved(bus: Bus) -> None:
    """Writes keep ids and order, replicas their places; no former key is left, and nothing is moved twice."""
    ids = _ids_of(30)
    await _fill(bus, ids)
    assert await adopt_former(bus, "c1", 0)
    assert await _ids(bus) == ids
    assert await bus.writes.applied("c1", 0) == {"r-1": ids[2], "r-2": ids[1]}
    assert await _former_keys(bus) == []
    assert not await adopt_former(bus, "c1", 0)
    await bus.writes.publish_snapshot("c1", 0, "r-1", ids[9])
    assert len(await _ids(bus)) == 30  # not below what the other replica's snapshot covers
    await bus.writes.publish_snapshot("c1", 0, "r-2", ids[4])
    assert await _ids(bus) == ids[4:]


async def test_writes_that_came_first_stay_behind(bus: Bus) -> None:
    """A router may have written before the former writes are moved: they go before its own, once each."""
    ids = _ids_of(20)
    await _fill(bus, ids)
    late = await bus.writes.append("c1", 0, Write(request="late", index=0, router="r1"))
    await adopt_former(bus, "c1", 0)
    rows = await bus.writes.read({("c1", 0): "0-0"})
    assert [entry for _, _, entry, _ in rows] == [*ids, late]
    assert [write.request for *_, write in rows if isinstance(write, Write)] == [*ids, "late"]
    after = await bus.writes.append("c1", 0, Write(request="after", index=0, router="r1"))
    rows = await bus.writes.read({("c1", 0): ids[-1]})
    assert [entry for _, _, entry, _ in rows] == [late, after]


@pytest.mark.parametrize("written_first", [False, True])
async def test_killed_at_every_step(
    bus: Bus, written_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended before or after any command, and begun anew, the move loses nothing and doubles nothing."""
    ids, steps, done = _ids_of(11), 0, False
    run = bus.connection._run
    left: int | None = None
    tag = keys.tag(bus.writes.search_family("c1"))

    async def counted(client: Any, work: Any, timeout_s: float) -> Any:
        nonlocal left
        if left is not None:
            left -= 1
            if left == 0:
                raise Killed
        reply = await run(client, work, timeout_s)
        if left is not None:
            left -= 1
            if left == 0:
                raise Killed
        return reply

    monkeypatch.setattr(bus.connection, "_run", counted)
    monkeypatch.setattr(bus.connection, "_synced", float("inf"))  # nothing besides is sent
    while not done:
        steps += 1
        left = None
        await bus.writes.drop_shard("c1", 0)
        await remove_former(bus, "c1", 0)
        await _fill(bus, ids)
        expected = list(ids)
        if written_first:
            mine = "9999-0"
            await bus.connection.call("XADD", f"{tag}:writes:c1/0", mine, "w", _write(mine))
            expected.append(mine)
        left = steps
        try:
            done = await adopt_former(bus, "c1", 0)
        except Killed:
            left = None
            await adopt_former(bus, "c1", 0)
        left = None
        assert await _ids(bus) == expected
        assert await bus.writes.applied("c1", 0) == {"r-1": ids[2], "r-2": ids[1]}
        assert await _former_keys(bus) == []
    assert steps > 30


async def test_queued_jobs_end(bus: Bus) -> None:
    """Jobs in the former lanes, queued or held by a worker that is no more, end as cancelled."""
    family = Family("search.c1", 0)
    hand = await Hand(bus, family, "w", "cpu").join()
    jobs = [new_job(family) for _ in range(3)]
    for job in jobs:
        await must(bus, job, classes=("cpu",))
    assert len(await hand.pull(1)) == 1
    await hand.die()
    assert await adopt_former(bus, "c1", 0)
    for job in jobs:
        assert (await outcome(bus, job)).kind == "cancelled"
    assert await matching(bus, "{search.c1/0}:lane:*") == []
