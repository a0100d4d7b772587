"""A deleted session's pages are forgotten by the workers that have them, and by nobody else's leave."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from hypothesis import given

from common.bus import Bus, keys
from common.config import WorkerConfig
from common.ids import Family, job_id, ulid
from common.pages.identity import PAGE, page_ids, root_id
from common.pages.keys import PageKey
from common.pages.store import PageStore
from common.registry.deletion import MOST, Deletions, digest_of
from common.registry.sessions import SessionEnds, Sessions
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from common.wire.sessions import SessionRecord, SessionTurn
from engine.decoder.executor.interface import ModelShape
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits
from engine.decoder.sequence import TokenSequence
from services.kv_store.deletion.page_eraser import PageEraser
from services.kv_store.deletion.session_eraser import SessionEraser
from services.kv_store.deletion.worker_eraser import WorkerEraser
from services.kv_store.pages.page_keeper import PageKeeper
from services.kv_store.pages.session_pages import session_pages
from tests.integration.engine.test_holding import say
from tests.integration.engine.test_pages_below import NEW, model, pages, prompt_of, put, serving  # noqa: F401 - fixtures
from tests.integration.engine.test_sessions import asked, begin, made
from tests.support.bus import Hand
from tests.support.engine import FAMILY, Desk, Worker, running, work
from tests.support.engine_simulator import Ask, Simulation, alone
from tests.support.servers import Server
from tests.unit.engine.test_schedule import cases

TEXT = "what many ask for, in the same words, before they say what they alone want; "


def there(worker: Worker, ids: list[bytes]) -> tuple[int, int]:
    """How many of a chain's pages a worker's device and host have."""
    found: tuple[int, int] = worker.scheduler.table.resident(ids)
    return found


async def test_what_others_refer_to_stays(bus: Bus, desk: Desk) -> None:
    """Of a deleted session goes what it alone had, a stopped turn's pages too; the last one takes the rest with it."""
    async with running(bus) as worker:
        ours, theirs = await made(desk), await made(desk)
        for record in (ours, theirs):
            await say(desk, record, TEXT * 2, anyone=True)
            await say(desk, record, record.id * 3, anyone=True)
        worker.runner.beta_s = 0.01
        current = await Sessions(bus).get(ours.id)
        assert current is not None
        stopped = await begin(desk, current, asked(current, [], "stopped" * 20, max_new=900))
        await desk.until(stopped, 5)
        await bus.control.cancel(stopped)
        await desk.end(stopped)
        worker.runner.beta_s = 0.0
        mine, other = await session_pages(bus, ours.id), await session_pages(bus, theirs.id)
        shared = [page for page in mine if page in other]
        left = page_ids(root_id(worker.runner.fingerprint, "t"), list(b"stopped" * 20))
        assert shared
        assert len(shared) < len(mine)
        for ids in (mine, other, left):
            assert there(worker, ids) == (len(ids), 0)

        done = await WorkerEraser(bus).erase(ours.id)
        assert done.not_searched == []
        assert done.pages >= len(mine) - len(shared) + len(left)
        (told,) = done.stores
        assert (told["store"], told["servers"]) == ("workers", 1)
        assert told["searched"][0]["in"] == f"device and host of {worker.consumer.name}"
        assert there(worker, mine) == (len(shared), 0)
        assert there(worker, left) == (0, 0)
        assert there(worker, other) == (len(other), 0)
        (*_, last) = await Sessions(bus).turns(ours.id)
        prompt = [
            t
            for turn in (await Sessions(bus).turns(ours.id))[:-1]
            for t in (*turn.prompt, *turn.output)
        ]
        _, result = await desk.result(await desk.admit(work([*prompt, *last.prompt], max_new=1)))
        assert result.cached_tokens == len(shared) * PAGE

        await WorkerEraser(bus).erase(theirs.id)
        assert there(worker, other) == (0, 0)


async def test_every_tier(bus: Bus, desk: Desk, model: Path, pages: Server, tmp_path: Path) -> None:  # noqa: F811
    """Device, host and Redis have its pages; after the deletion none of them has, and the prompt is computed anew."""
    runner = TorchExecutor.load(
        str(model), device="cpu", dtype="fp32", kv_bytes=1 << 20, host_bytes=4 << 20
    )
    family = Family(runner.card(created_ms=0, partitions=1).family)
    here = Desk(bus, desk.journal, family)
    async with serving(bus, runner, pages.url) as worker:
        record = await session(bus, family, runner)
        prompt = prompt_of(12)
        turn = SessionTurn(session=record.id, version=0, history=0, messages=b"[]")
        asked_ = ask(runner, prompt, turn)
        await here.result(await here.admit(asked_, session=record.id, version=0))
        await put(worker, 12)
        rng = random.Random(3)
        while (
            there(worker, await session_pages(bus, record.id))[1] < 2
        ):  # push some of it to the host
            filler = [rng.randrange(50) for _ in range(10 * PAGE)]
            await here.result(await here.admit(ask(runner, filler)))
        store = PageStore.of(WorkerConfig(pages_url=pages.url), bus.clock)
        assert store is not None
        ids = await session_pages(bus, record.id)
        names = [PageKey(page, 0) for page in ids]
        assert await store.where(names) == ["redis"] * len(ids)

        eraser = SessionEraser(
            bus, PageEraser(bus, store, PageKeeper(store, tmp_path, 0)), WorkerEraser(bus)
        )
        (proof,) = await eraser.erase([(record.id, "t")], bus.clock.now_ms() + 10_000, prove=True)
        await SessionEnds(bus).forget(record.id, "t")
        assert [one["store"] for one in proof["proof"]["stores"]] == ["bus", "workers", "pages"]
        assert proof["removed"]["worker_pages"] >= 2
        assert proof["removed"]["pages"] >= 12
        assert proof["removed"]["held"] == 1
        assert there(worker, ids) == (0, 0)
        assert await store.where(names) == [None] * len(ids)
        _, result = await here.result(await here.admit(ask(runner, prompt)))
        assert result.cached_tokens == 0
        await store.close()


async def session(bus: Bus, family: Family, runner: TorchExecutor) -> SessionRecord:
    """An empty session of a runner's model."""
    now = bus.clock.now_ms()
    record = SessionRecord(
        id=job_id(family, ulid()), tenant="t", model=runner.name, fingerprint=runner.fingerprint, version=0,
        tokens=0, turns=0, ttl_s=600, created_ms=now, updated_ms=now,
    )  # fmt: skip
    await Sessions(bus).create(record)
    return record


def ask(runner: TorchExecutor, prompt: list[int], turn: SessionTurn | None = None) -> GenerateWork:
    """Work on a prompt."""
    greedy = SamplingParams(temperature=0.0)
    return GenerateWork(
        prompts=[prompt], max_new=NEW, fingerprint=runner.fingerprint, scope="t", sampling=greedy,
        ignore_eos=True, turn=turn,
    )  # fmt: skip


async def test_who_does_not_answer(bus: Bus, desk: Desk) -> None:
    """A worker that lives and is silent is named, and finds it unread later; a dead one is not waited for."""
    silent, dead = await Hand(bus, FAMILY, "silent").join(), await Hand(bus, FAMILY, "dead").join()
    await dead.die()
    async with running(bus) as worker:
        record = await made(desk)
        await say(desk, record, TEXT, anyone=True)
        ids = await session_pages(bus, record.id)
        done = await WorkerEraser(bus, wait_s=0.3).erase(record.id)
        assert [line.split()[0] for line in done.not_searched] == ["silent"]
        assert done.stores[0]["servers"] == 1
        assert there(worker, ids) == (0, 0)
        (told,) = await Deletions(bus).read(FAMILY, "0-0")
        assert (told.session, told.ids) == (digest_of(record.id), ids)
        await silent.die()
        done = await WorkerEraser(bus, wait_s=60).erase(record.id)
        assert done.not_searched == []


async def test_more_deletions_than_are_kept(bus: Bus, desk: Desk) -> None:
    """A worker that may have missed some forgets all it has: what was deleted is never found again."""
    async with running(bus) as worker:
        await desk.result(await desk.admit(work(TEXT * 3, max_new=1)))
        assert list(worker.scheduler.table.pools[0])
        name = keys.forgets(FAMILY)
        flood = f"for i = 1, {MOST} do redis.call('XADD', KEYS[1], '*', 's', 'x', 'p', '') end"
        await bus.connection.call("EVAL", flood, 1, name)
        async with asyncio.timeout(60):
            while list(worker.scheduler.table.pools[0]):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)


async def test_a_turn_that_still_runs(bus: Bus, desk: Desk) -> None:
    """What the worker still runs of the session leaves with its pages, though its end was not heard of yet."""
    async with running(bus) as worker:
        worker.runner.beta_s = 0.02
        record = await made(desk)
        job = await begin(desk, record, asked(record, [], TEXT, max_new=500))
        await desk.until(job, 3)
        ids = page_ids(root_id(worker.runner.fingerprint, "t"), list(TEXT.encode()))
        await WorkerEraser(bus).erase(record.id)
        assert there(worker, ids) == (0, 0)
        assert not worker.scheduler.running
        await bus.control.cancel(job)


# -- pure ----------------------------------------------------------------------------------------------------


class Forgetful(Simulation):
    """Between any two steps some pages, held or moving or at rest, are forgotten."""

    def _step(self) -> bool:
        tiers = self.scheduler.table.tiers
        known = sorted({page for pool in (*tiers.device, *tiers.host) for page in pool})
        gone = [page for page in known if self.chance.random() < 0.2]
        device, host = tiers.forget(gone)
        assert max(device, host) <= len(gone) <= device + host
        assert not any(page in set(gone) for pool in (*tiers.device, *tiers.host) for page in pool)
        return super()._step()


@given(cases())
def test_forgotten_pages_are_computed(case: tuple[ModelShape, StepLimits, list[Ask]]) -> None:
    """Whatever is forgotten in between, everyone gets the tokens it would get alone, and no page is lost."""
    run = Forgetful(*case).run()
    for sequence, each in zip(run.sequences, case[2], strict=True):
        expected = alone(each)
        assert sequence.output == (
            expected if each.leaves < 0 else expected[: len(sequence.output)]
        )


@given(cases())
def test_what_is_resident(case: tuple[ModelShape, StepLimits, list[Ask]]) -> None:
    """Pages said to be resident are those that the next turn would not compute."""
    run = Forgetful(*case).run()
    for sequence in run.sequences:
        ids = sequence.ids
        following = TokenSequence(
            "next",
            0,
            99,
            [*sequence.tokens()[: len(ids) * PAGE], 1],
            root=sequence.root,
            most=1 << 20,
        )
        table = run.scheduler.table
        rows = sum(end - start for start, end in table.match(following).todo)
        device, host = table.resident(ids)
        if all(window is None for window in case[0].windows):
            assert (device + host) * PAGE == following.length - rows
            assert device == sum(table.pools[0].find(page) is not None for page in ids)
        else:  # under a window, what is missing may take what is there to be computed anew, too
            assert (device + host) * PAGE <= following.length - 1
        assert all(
            table.keeps(page) == table.tiers.has(0, page)
            for page in ids
            if not any(case[0].windows)
        )


def test_digests_differ() -> None:
    """A digest names one session."""
    assert len({digest_of(f"s{n}") for n in range(1000)}) == 1000
