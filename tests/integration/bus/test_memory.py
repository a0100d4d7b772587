"""What the bus' Redis holds is bounded by what is kept on purpose: counted in keys and bytes, not by time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.bus import Bus, Notifications, keys
from common.bus.events import KEPT
from common.ids import Family
from common.registry.requests import Requests
from common.registry.sessions import SessionEnds
from common.wire.results import Event, GenerateResult
from common.wire.sessions import SessionTurn
from tests.support.bus import Hand, admit, new_job, open_bus
from tests.support.servers import Server
from tests.support.turns import made, turn_of
from tests.support.waiting import until

FAMILY = Family("chat.test")
DONE = GenerateResult(prompt_tokens=3, completion_tokens=2, version=1)
TURNS, FEW, MANY = 6, 20, 320
SLACK_BYTES = 65_536  # what buffers of connections differ by; 300 sessions are ten times as much
KEPT_ALWAYS = {
    keys.use(FAMILY),
    keys.plan(FAMILY),
    keys.journals(FAMILY),
    keys.journal(FAMILY, "r"),
    keys.sessions(FAMILY, "t"),
    keys.tenants(FAMILY),
    keys.due(FAMILY),
}


@pytest.fixture
async def own_bus(redis_server: Server, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus on a server whose memory nobody else uses."""
    opened = await open_bus(redis_server.url, str(tmp_path))
    yield opened
    await opened.close()


async def _converse(bus: Bus, hand: Hand) -> str:
    """Have a conversation whose turns are delivered, and return its session."""
    record = await made(bus, FAMILY)
    for version in range(TURNS):
        job = new_job(FAMILY)
        await admit(bus, job, session=record.id, version=version, router="r")
        (lease,) = await hand.pull()
        event = Event(index=0, kind="progress", data=b"x" * 100)
        assert await hand.step([lease], {lease.job: event}) == set()
        part = SessionTurn(session=record.id, version=version, history=5 * version, messages=b"[]")
        turn = turn_of(lease.job, 5 * version)
        assert await hand.finish(lease, DONE, index=1, part=(turn, part)) == "ok"
        await Requests(bus).remove([lease.job])  # as its router does once it is delivered
    return record.id


async def _names(bus: Bus) -> set[str]:
    return {name.decode() for name in await bus.connection.call("KEYS", "*")}


async def _used_bytes(bus: Bus) -> int:
    """Return the bytes that the server uses, less notifications, which another test bounds."""
    await bus.connection.call("DEL", keys.journal(FAMILY, "r"))
    lines = (await bus.connection.call("INFO", "memory")).decode().splitlines()
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(told["used_memory"])


async def test_conversations_leave_only_their_sessions(own_bus: Bus) -> None:
    """However many conversations there were, only the keys of their sessions add up; deleted, they leave nothing."""
    bus = own_bus
    journal = Notifications(bus.connection, "r")
    hand = await Hand(bus, FAMILY, "w").join()
    bell = journal.bell("nobody's job", FAMILY)
    before, sizes = await _names(bus), []
    for conversations in (FEW, MANY):
        sessions = [await _converse(bus, hand) for _ in range(conversations)]
        more = {name for name in await _names(bus) - before if ":session:" not in name}
        assert more <= KEPT_ALWAYS

        for name in sessions:
            await SessionEnds(bus).forget(name, "t")
        assert not any(":session:" in name for name in await _names(bus))
        sizes.append(await _used_bytes(bus))
    assert sizes[1] - sizes[0] <= SLACK_BYTES
    bell.close()
    await journal.stop()


async def test_a_journal_holds_what_its_router_has_not_heard(own_bus: Bus) -> None:
    """Notifications leave a journal soon after they were heard: of any number a few hundred stay at most."""
    bus, name = own_bus.connection, keys.journal(FAMILY, "r")
    journal = Notifications(bus, "r")
    bell = journal.bell("job", FAMILY)
    for number in range(8 * KEPT):
        await bus.call("XADD", name, "*", "j", "another", "i", number, "e", b"x" * 200)
    await bus.call("XADD", name, "*", "j", "job", "i", 0, "e", b"")
    assert await bell.wait(60.0) is None  # the last one is heard, so all are

    async def trimmed() -> bool:
        return int(await bus.call("XLEN", name)) <= KEPT

    assert await until(trimmed, "the journal is trimmed")
    bell.close()
    await journal.stop()
