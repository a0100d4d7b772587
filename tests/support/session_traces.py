"""Sessions with everything a request may leave on the bus, every bit of it marked, and a search for the mark."""

from __future__ import annotations

import hashlib
from typing import Any

from common.bus import Bus, NewJob, keys
from common.ids import Family, child_id, job_id, ulid
from common.registry.idempotency import Idempotency
from common.registry.sessions import Sessions
from common.types.model_card import ModelCard
from common.wire.jobs import EmbedWork, GenerateWork
from common.wire.message import encode
from common.wire.results import Event, GenerateResult
from common.wire.sessions import SessionRecord, SessionTurn, Turn
from common.wire.workflows import RequestResult, RequestWork
from common.worker.leases import Lease
from tests.support.bus import Hand, matching
from tests.support.turns import made

FAMILY = Family("chat.test")
REQUESTS, EMBEDS = Family("request"), Family("embed.test")


def card() -> ModelCard:
    """Return the card of a generator with 11 token ids."""
    return ModelCard(
        name="test",
        kind="generate",
        family=FAMILY.name,
        fingerprint="f",
        dimension=0,
        max_tokens=100,
    )


def turn_of(job: str, record: SessionRecord, text: str) -> Turn:
    """Return the turn that follows on a session."""
    return Turn(
        job=job,
        history=record.tokens,
        messages=b'[{"role":"user","content":"%s?"}]' % text.encode(),
        answer=text,
        prompt=[1, 2, 3],
        output=[4, 5],
        finish="stop",
        at_ms=1_700_000_000_000,
    )


def part_of(record: SessionRecord) -> SessionTurn:
    """Return what a generation knows of the session."""
    return SessionTurn(
        session=record.id, version=record.version, history=record.tokens, messages=b"[]"
    )


async def begin(bus: Bus, hand: Hand, record: SessionRecord, text: str, origin: str = "") -> Lease:
    """Admit a turn whose payload holds `text`, and lease it."""
    job = child_id(origin, FAMILY, "chat", 0) if origin else job_id(FAMILY, ulid())
    turn = SessionTurn(session=record.id, version=record.version, history=0, messages=text.encode())
    work = GenerateWork(fingerprint="f", scope="t", prompts=[[1]], max_new=1, turn=turn)
    said = await bus.admission.admit(
        [NewJob(job, encode(work), 1, 10, text.encode())],
        classes=("gpu",),
        router="r1",
        tenant="t",
        deadline_ms=bus.clock.now_ms() + 60_000,
        session=record.id,
        version=record.version,
        origin=origin,
    )
    assert said.outcome == "admitted", said
    (lease,) = await hand.pull()
    return lease


async def end(bus: Bus, hand: Hand, lease: Lease, record: SessionRecord, text: str) -> None:
    """Stream `text` and finish the turn."""
    event = Event(index=0, kind="progress", data=text.encode())
    await hand.step([lease], {lease.job: event})
    part = (turn_of(lease.job, record, text), part_of(record))
    result = GenerateResult(prompt_tokens=3, completion_tokens=2)
    assert await hand.finish(lease, result, index=1, part=part) == "ok"


async def lived(bus: Bus, hand: Hand, text: str) -> SessionRecord:
    """Return a session that has had a turn, a grounded turn, a turn that died, and clients that came back for them."""
    record = await made(bus, FAMILY, model="test")
    lease = await begin(bus, hand, record, text)
    await end(bus, hand, lease, record, text)
    await around(bus, lease.job, text)
    record = await now(bus, record)
    request = job_id(REQUESTS, ulid())
    await grounded(bus, record, request, text)
    lease = await begin(bus, hand, record, text, origin=request)
    await end(bus, hand, lease, record, text)
    record = await now(bus, record)
    lease = await begin(bus, hand, record, text)
    for _ in range(3):
        await hand.fail(lease, "model_error", text, text)
        lease = next(iter(await hand.take()), lease)
    return record


async def around(bus: Bus, request: str, text: str) -> None:
    """Leave what the router keeps beside a request: who came back, its idempotency claim."""
    tag = keys.job(request).partition(":job:")[0]
    await bus.connection.call("SET", f"{tag}:seen:{request}", text)
    await Idempotency(bus).claim(
        "t", text + ulid(), hashlib.blake2b(digest_size=16).digest(), request
    )


async def grounded(bus: Bus, record: SessionRecord, request: str, text: str) -> None:
    """Run a request of several jobs to its end: its own, and one that embeds the question."""
    embed = child_id(request, EMBEDS, "embed", 0)
    await Sessions(bus).note_job(record.id, request)
    await Sessions(bus).note_job(record.id, embed, request)
    given: list[tuple[str, Any, str, Family]] = [
        (request, RequestWork(kind="ground", tenant="t", body=text.encode()), "router", REQUESTS),
        (embed, EmbedWork(fingerprint=text, tokens=[[1]]), "gpu", EMBEDS),
    ]
    for job, work, cls, family in given:
        hand = await Hand(bus, family, f"w{ulid()}", cls).join()
        said = await bus.admission.admit(
            [NewJob(job, encode(work), 1, 1, text.encode())],
            classes=(cls,),
            router="r1",
            tenant="t",
            deadline_ms=bus.clock.now_ms() + 60_000,
        )
        assert said.outcome == "admitted", said
        (lease,) = await hand.pull()
        await hand.finish(lease, RequestResult(body=text.encode()))
    await around(bus, request, text)


async def now(bus: Bus, record: SessionRecord) -> SessionRecord:
    """Return a session as it is now."""
    found = await Sessions(bus).get(record.id)
    assert found is not None
    return found


async def holding(bus: Bus, *marks: str) -> list[str]:
    """Return every key whose name or value holds one of the marks, on every server, whatever its type."""
    reads = {
        b"string": ("GET",),
        b"hash": ("HGETALL",),
        b"list": ("LRANGE", 0, -1),
        b"set": ("SMEMBERS",),
        b"zset": ("ZRANGE", 0, -1),
        b"stream": ("XRANGE", "-", "+"),
    }
    found = []
    for name in await matching(bus, "*"):
        kind = await bus.connection.call("TYPE", name)
        if kind == b"none":
            continue  # it has expired since
        verb, *rest = reads[kind]
        value = name + repr(await bus.connection.call(verb, name, *rest))
        found += [name] if any(mark in value for mark in marks) else []
    return found
