"""Who holds a session's pages: its turns go there if that pays, elsewhere if it does not, and say the same."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from common.bus import Bus
from common.config import Common
from common.pages.identity import PAGE, STRIDE, marks_of, page_ids, root_id
from common.registry.cache_directory import CacheDirectory
from common.registry.sessions import Sessions
from common.wire.registry import WorkerRecord
from common.wire.sessions import SessionRecord
from engine.decoder.kv.prefix_index import PrefixIndex
from services.router.admission.affinity import NOBODY, Preference, choose, preferred, reads_first
from services.router.admission.job_spec import Prompt
from tests.faults.engine.test_failover import SIM, live, process
from tests.integration.engine.test_sessions import asked, made, now
from tests.support.engine import FAMILY, Desk, HeldRunner, Worker, running, tokens_of, work

LONG = "a long question that fills some pages of tokens; " * 6


async def say(
    desk: Desk, record: SessionRecord, text: str, *, anyone: bool = False
) -> tuple[str, list[int], int]:
    """Run a session's next turn as a router does; return its lane, its tokens, and how many of its prompt were found.

    `anyone` leaves out who holds its pages.
    """
    record = await now(desk, record)
    history = [
        token
        for turn in await Sessions(desk.bus).turns(record.id)
        for token in (*turn.prompt, *turn.output)
    ]
    made_ = asked(record, history, text, max_new=40)
    job = await desk.admit(
        made_,
        session=record.id,
        version=record.version,
        **({} if anyone else await holder(desk, record, made_)),
    )
    state = await desk.bus.jobs.get(job)
    assert state is not None
    pieces, result = await desk.result(job)
    return state.lane, tokens_of(pieces), result.cached_tokens


async def holder(desk: Desk, record: SessionRecord, work_: Any) -> dict[str, Any]:
    """Return whom a turn prefers, as the door is told."""
    desk.bus.workers.forget(FAMILY)
    prompt = work_.prompts[0]
    marks = marks_of(page_ids(root_id(work_.fingerprint, work_.scope), prompt))
    asked = Prompt(record.id if record else "", 0, marks, len(prompt))
    found = await preferred(desk.bus, FAMILY, ("gpu",), asked)
    return {"prefer": found.worker, "value_s": found.value_s}


def own(worker: Worker) -> str:
    """Return the class of a worker's own lane."""
    return f"w.{worker.consumer.name}"


async def test_turns_stay_with_the_holder(bus: Bus, desk: Desk) -> None:
    """From its second turn on a session's turns go to the worker that has its pages; it computes the new ones only."""
    async with running(bus) as one, running(bus) as two:
        record = await made(desk)
        lane, _, found = await say(desk, record, LONG)
        assert (lane, found) == ("gpu", 0)
        held = await CacheDirectory(bus).held(record.id)
        assert held is not None
        lanes = {own(one), own(two)}
        assert f"w.{held.worker}" in lanes
        for turn in range(3):
            before = await now(desk, record)
            lane, _, found = await say(desk, record, f"and {turn}? ")
            assert lane == f"w.{held.worker}"
            assert found >= (before.tokens - 1) // PAGE * PAGE
        after = await CacheDirectory(bus).held(record.id)
        assert after is not None
        assert after.worker == held.worker
        assert after.device_tokens == ((await now(desk, record)).tokens - 1) // PAGE * PAGE
        assert after.host_tokens == 0


async def test_an_overloaded_holder_loses_the_turn(bus: Bus, desk: Desk) -> None:
    """Where waiting for the holder takes longer than computing anew, the turn goes elsewhere and says the same."""
    async with running(bus, HeldRunner(alpha_s=0.001)) as one:
        record = await made(desk)
        await say(desk, record, LONG)
        async with running(bus, HeldRunner(alpha_s=0.001)) as two:
            lane, *_ = await say(desk, record, "first")
            assert lane == own(one)
            one.runner.gate.clear()
            busy = [
                await desk.admit(work("other work " * 40, max_new=60), prefer=one.consumer.name)
                for _ in range(4)
            ]
            lane, tokens, _ = await say(desk, record, "then")
            assert lane == "gpu"
            one.runner.gate.set()
            for job in busy:
                await desk.result(job)
            held = await CacheDirectory(bus).held(record.id)
            assert held is not None
            assert held.worker == two.consumer.name
            expected = await twin(desk, record, tokens)
            assert tokens == expected


async def twin(desk: Desk, record: SessionRecord, tokens: list[int]) -> list[int]:
    """Return what the last turn's prompt gives when it is asked outside of the session."""
    (*_, last) = await Sessions(desk.bus).turns(record.id)
    history = [
        t
        for turn in (await Sessions(desk.bus).turns(record.id))[:-1]
        for t in (*turn.prompt, *turn.output)
    ]
    pieces, _ = await desk.result(
        await desk.admit(work([*history, *last.prompt], max_new=len(tokens)))
    )
    return tokens_of(pieces)


async def test_a_killed_holder(bus: Bus, desk: Desk, config: Common) -> None:
    """kill -9 of the worker that has the pages: the next turn, sent there, is taken over and says the same."""
    with (
        process(config, *SIM, "--instance", "a") as one,
        process(config, *SIM, "--instance", "b") as two,
    ):
        await live(bus, FAMILY, 2)
        pids = {record.worker: record.pid for record in await bus.workers.living(FAMILY)}
        record = await made(desk)
        await say(desk, record, LONG)
        held = await CacheDirectory(bus).held(record.id)
        assert held is not None
        os.kill(pids[held.worker], signal.SIGKILL)
        assert pids[held.worker] in {one.pid, two.pid}
        _, tokens, _ = await say(desk, record, "and then?")
        assert tokens == await twin(desk, record, tokens)
        after = await CacheDirectory(bus).held(record.id)
        assert after is not None
        assert after.worker != held.worker
        lane, *_ = await say(desk, record, "and now?")
        assert lane in {f"w.{after.worker}", "gpu"}


async def test_plain_prompts_find_their_prefix(bus: Bus, desk: Desk) -> None:
    """A prompt that begins as one before it prefers the worker that computed that, for as long as it has it."""
    async with running(bus) as one, running(bus):
        prompt = list((LONG * 4).encode())
        first = work(prompt, max_new=2)
        pieces, _ = await desk.result(await desk.admit(first, prefer=one.consumer.name))
        await one.loop.announcer.look()
        again = work([*prompt, *b" more"], max_new=2)
        found = await holder(desk, None, again)  # type: ignore[arg-type]
        pages = len(prompt) // PAGE // STRIDE * STRIDE
        assert found["prefer"] == one.consumer.name
        value = pages * PAGE * one.consumer.record.alpha_tokens_s
        assert abs(found["value_s"] - value) < 1e-9
        assert tokens_of(pieces)
        one.scheduler.table.tiers.forget(list(one.scheduler.table.pools[0]))
        await one.loop.announcer.look()
        assert (await holder(desk, None, again))["prefer"] is None  # type: ignore[arg-type]


async def test_a_hint_that_is_over(bus: Bus, desk: Desk) -> None:
    """A worker whose session went on elsewhere says no more of it; a hint of a worker that is gone is not followed."""
    async with running(bus) as one, running(bus) as two:
        record = await made(desk)
        await say(desk, record, LONG)
        held = await CacheDirectory(bus).held(record.id)
        assert held is not None
        first, second = (one, two) if held.worker == one.consumer.name else (two, one)
        await CacheDirectory(bus).publish_held(
            record.id, type(held)(second.consumer.name, 64, 0, b"", 0)
        )
        first.scheduler.table.tiers.forget(list(first.scheduler.table.pools[0]))
        await first.loop.announcer.look()
        assert (await CacheDirectory(bus).held(record.id)).worker == second.consumer.name  # type: ignore[union-attr]
        await CacheDirectory(bus).publish_held(record.id, type(held)("gpu-gone", 64, 0, b"", 0))
        lane, *_ = await say(desk, record, "x")
        assert lane == "gpu"


# -- pure ----------------------------------------------------------------------------------------------------


def worker(alpha: float, *, draining: bool = False) -> WorkerRecord:
    """A worker's record with this cost."""
    return WorkerRecord(
        worker="",
        classes=[],
        device="",
        depth_items=1,
        depth_tokens=1,
        alpha_tokens_s=alpha,
        draining=draining,
    )


NAMES = st.sampled_from(["a", "b", "c", "d"])
WORKERS = st.dictionaries(NAMES, st.builds(worker, st.floats(0, 1), draining=st.booleans()))


@given(st.dictionaries(NAMES, st.integers(0, 10_000)), WORKERS, st.integers(0, 9000))
def test_the_choice(tokens: dict[str, int], workers: dict[str, WorkerRecord], most: int) -> None:
    """It is the worker that takes work and whose tokens are worth most; nobody where there is no choice."""
    found = choose(tokens, workers, most)
    takes = [name for name, record in workers.items() if not record.draining]
    worth = {n: min(tokens[n], most) * workers[n].alpha_tokens_s for n in takes if tokens.get(n)}
    if len(takes) < 2 or not worth:
        assert found == NOBODY
    else:
        assert found.worker in worth
        assert found == Preference(found.worker, max(worth.values()))


@given(st.dictionaries(NAMES, st.sampled_from(["gpu", "cpu"])))
def test_who_reads_questions_first(classes: dict[str, str]) -> None:
    """The only worker of the first class that is served; nobody where several share that class."""
    workers = {
        name: msgspec.structs.replace(worker(1.0), classes=[cls]) for name, cls in classes.items()
    }
    first = [name for name, cls in classes.items() if cls == "gpu"] or list(classes)

    found = reads_first(["gpu", "cpu"], workers).worker
    assert found == (first[0] if len(first) == 1 else None)


CHAIN = st.integers(0, 3).flatmap(lambda kind: st.integers(0, 40).map(lambda n: (kind, n)))


def chain(kind: int, pages: int) -> list[bytes]:
    """A chain of pages; chains of kinds share their first ten."""
    return [bytes([0 if n < 10 else kind, n]) for n in range(pages)]


@given(
    st.lists(st.tuples(st.sampled_from(["", "s", "t", "u"]), CHAIN), max_size=30),
    st.integers(1, 90),
)
def test_whose_pages(turns: list[tuple[str, tuple[int, int]]], most: int) -> None:
    """What a deletion names is all that this session had and no other that is remembered; memory is bounded."""
    residents = PrefixIndex(most_pages=most, most_marks=4)
    had: dict[str, set[bytes]] = {}
    for session, (kind, pages) in turns:
        residents.left(session, chain(kind, pages))
        had.setdefault(session, set()).update(chain(kind, pages))
        assert len(residents.marks) <= 4
        if session:
            assert residents.sessions[-1] == session
            assert residents.chain(session) == chain(kind, pages)
        kept = [len(residents.chain(name)) for name in residents.sessions]
        assert sum(kept) <= most or len(kept) <= 1
    remembered = residents.sessions
    for session in remembered:
        others = [name for name in residents.sessions if name != session]
        gone = set(residents.delete(session, [b"told"]))
        assert session not in residents.sessions
        assert b"told" in gone
        assert gone <= had[session] | {b"told"}
        assert not any(set(residents.chain(name)) & gone for name in others)
        assert not set(residents.marks) & gone
    assert residents.delete("unknown", []) == []


async def test_marks_expire(bus: Bus) -> None:
    """Marks of a worker are found until they are taken back; those of others are not its."""
    marks = [bytes([n]) * 16 for n in range(3)]
    await CacheDirectory(bus).publish_marks(FAMILY, "a", marks)
    await CacheDirectory(bus).publish_marks(FAMILY, "b", marks[:1])
    assert await CacheDirectory(bus).marked(FAMILY, marks, ["a", "b", "c"]) == {
        "a": 3 * STRIDE,
        "b": STRIDE,
    }
    await CacheDirectory(bus).publish_marks(FAMILY, "a", (), marks[1:])
    assert await CacheDirectory(bus).marked(FAMILY, marks, ["a"]) == {"a": STRIDE}
    assert await CacheDirectory(bus).marked(FAMILY, [], ["a"]) == {}
