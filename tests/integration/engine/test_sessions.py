"""Turns of a session, as the engine ends them: appended with the result, found by the next, kept or not if stopped."""

from __future__ import annotations

import asyncio
from typing import Any

from common.bus import Bus
from common.ids import job_id, ulid
from common.registry.sessions import Sessions
from common.wire.jobs import GenerateWork
from common.wire.sessions import SessionRecord, SessionTurn
from engine.decoder.executor.simulated_executor import SimulatedExecutor
from tests.support.engine import FAMILY, Desk, HeldRunner, Worker, running, text_of, work


def asked(record: SessionRecord, history: list[int], text: str, **more: Any) -> GenerateWork:
    """Return the work of a session's next turn."""
    keep = more.pop("keep", False)
    turn = SessionTurn(
        session=record.id,
        version=record.version,
        history=len(history),
        messages=b"[]",
        keep_partial=keep,
    )
    return work([*history, *text.encode()], turn=turn, **more)


async def made(desk: Desk) -> SessionRecord:
    """Create an empty session."""
    now = desk.bus.clock.now_ms()
    record = SessionRecord(
        id=job_id(FAMILY, ulid()),
        tenant="t",
        model="sim-chat",
        fingerprint=SimulatedExecutor(alpha_s=0, beta_s=0).fingerprint,
        version=0,
        tokens=0,
        turns=0,
        ttl_s=600,
        created_ms=now,
        updated_ms=now,
    )
    await Sessions(desk.bus).create(record)
    return record


async def begin(desk: Desk, record: SessionRecord, asked: GenerateWork) -> str:
    """Admit a turn."""
    return await desk.admit(asked, session=record.id, version=record.version)


async def now(desk: Desk, record: SessionRecord) -> SessionRecord:
    """Return the session as it stands."""
    found = await Sessions(desk.bus).get(record.id)
    assert found is not None
    return found


async def test_turns(bus: Bus, desk: Desk) -> None:
    """A turn's answer and tokens are appended as its job ends, and the next turn finds its pages computed."""
    async with running(bus) as worker:
        record = await made(desk)
        first = await begin(desk, record, asked(record, [], "a" * 100, max_new=60))
        pieces, result = await desk.result(first)
        record = await now(desk, record)
        (turn,) = await Sessions(bus).turns(record.id)
        assert (record.version, result.version, record.turns) == (1, 1, 1)
        assert (turn.job, turn.answer, turn.finish) == (first, text_of(pieces), "length")
        assert (bytes(turn.prompt), bytes(turn.output).decode()) == (b"a" * 100, turn.answer)

        history = [*turn.prompt, *turn.output]
        second = await begin(desk, record, asked(record, history, "b" * 10, max_new=5))
        _, result = await desk.result(second)
        assert result.cached_tokens == 159 // 32 * 32  # the last token's row was never computed
        assert result.prompt_tokens == 170
        record = await now(desk, record)
        assert (record.version, record.tokens) == (2, 175)

        history += [*b"b" * 10, *(await Sessions(bus).turns(record.id))[1].output]
        cut = await begin(desk, record, asked(record, history, "x", max_new=50, stop=["ted "]))
        pieces, _ = await desk.result(cut)
        turn = (await Sessions(bus).turns(record.id))[2]
        assert turn.answer == text_of(pieces) == "simula"
        assert bytes(turn.output) == b"simula"
        await cancelled_turns(worker, desk, await now(desk, record))


async def cancelled_turns(worker: Worker, desk: Desk, record: SessionRecord) -> None:
    """A cancelled turn frees the session; what was delivered of it is kept only if that was asked for."""
    worker.runner.beta_s = 0.01
    for keep in (False, True):
        record = await now(desk, record)
        turns = len(await Sessions(desk.bus).turns(record.id))
        job = await begin(desk, record, asked(record, [], "long", max_new=4000, keep=keep))
        await desk.until(job, 5)
        assert await desk.bus.control.cancel(job) == "flagged"
        assert (await desk.end(job)).kind == "cancelled"
        found = await Sessions(desk.bus).turns(record.id)
        assert len(found) == turns + keep
        if keep:
            delivered = text_of(await desk.pieces(job))
            assert (found[-1].answer, found[-1].partial) == (delivered, True)
            assert bytes(found[-1].output).decode() == delivered
    record = await now(desk, record)
    await desk.result(await begin(desk, record, asked(record, [], "again", max_new=2)))


async def test_a_session_deleted_in_mid_turn(bus: Bus, desk: Desk) -> None:
    """A turn of a session that is deleted meanwhile ends without appending anything."""
    async with running(bus, HeldRunner(beta_s=0.01)) as worker:
        record = await made(desk)
        job = await begin(desk, record, asked(record, [], "x", max_new=100))
        await desk.until(job, 5)
        await Sessions(bus).mark_deleted(record.id)
        event = await desk.end(job)
        assert (event.kind, event.code) in {
            ("error", "session_deleted"),
            ("cancelled", "cancelled"),
        }
        assert await Sessions(bus).get(record.id) is None
        async with asyncio.timeout(60):
            while not worker.no_page_held():  # noqa: ASYNC110 - the pools have no event for it
                await asyncio.sleep(0.005)
