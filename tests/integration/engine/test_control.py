"""Generations paused and extended on a real bus: boundaries, late extensions, refusals, ends and hand-overs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from cli import main
from common.bus import Bus, keys
from common.config import Common
from common.registry.dead_letters import DeadLetters
from common.registry.sessions import Sessions
from common.wire.control import Applied, Extend, ExtensionRule, Pause
from common.wire.results import decode_delta
from engine.decoder.executor.simulated_executor import answer
from services.adapters.generate import job as job_module
from tests.integration.engine.test_sessions import asked, begin, made
from tests.support.engine import (
    FAMILY,
    WAIT_S,
    Desk,
    HeldRunner,
    Worker,
    running,
    text_of,
    tokens_of,
    work,
)

PROMPT = [*b"p" * 100]


def extend(number: int, text: str) -> Extend:
    """Return an extension that puts `text` into the slot of PROMPT."""
    return Extend(number=number, start=70, removed=10, tokens=[*text.encode()])


def said(count: int, changes: Sequence[tuple[int, Extend]], prompt: Sequence[int] = PROMPT) -> str:
    """Return what the sim device says if the prompt is extended after so many tokens each time."""
    output = bytearray()
    while len(output) < count:
        passed = [each for at, each in changes if at <= len(output) and each.changes]
        phrase = answer(passed[-1].prompt(list(prompt)) if passed else list(prompt), 0)
        output.append(phrase[len(output) % len(phrase)])
    return output.decode()


async def applied(desk: Desk, job: str) -> list[Applied]:
    """Return the extensions in a job's log, each once."""
    found: list[Applied] = []
    for event in await desk.bus.jobs.log(job):
        if event.kind == "progress":
            last = found[-1].extension.number if found else 0
            found += [
                each for each in decode_delta(event.data).applied if each.extension.number > last
            ]
    return found


async def paused(worker: Worker, count: int = 1) -> None:
    """Wait until so many sequences are paused, or wait."""
    async with asyncio.timeout(WAIT_S):
        while len(worker.scheduler.paused) != count or worker.loop.engine.running:  # noqa: ASYNC110 - the scheduler has no event for it
            await asyncio.sleep(0.002)


async def heard(worker: Worker, job: str, count: int) -> None:
    """Wait until the worker has fetched so many extensions of a job that have not taken effect."""
    async with asyncio.timeout(WAIT_S):
        while (held := worker.loop._jobs.get(job)) is None or len(held.extensions._sent) < count:  # noqa: ASYNC110 - a fetch has no event
            await asyncio.sleep(0.002)


async def test_a_generation_waits_for_each_extension(bus: Bus, desk: Desk) -> None:
    """At each boundary it waits for the extension of that number; what comes early, or changes nothing, is taken there.

    A prompt changes where the log says, and pages before the slot are not computed again.
    """
    rule = ExtensionRule(every=8, most=4)
    async with running(bus) as worker:
        job = await desk.admit(work(PROMPT, max_new=50, extensions=rule))
        await desk.until(job, 8)
        await paused(worker)
        assert len(tokens_of(await desk.pieces(job))) == 8
        rows = len(worker.runner.batches)
        assert await bus.control.send(job, extend(1, "first")) == "sent"
        await desk.until(job, 16)
        first = worker.runner.batches[rows]
        assert [(len(each.positions), each.positions[0]) for each in first] == [(103 - 64, 64)]
        await paused(worker)
        for extension in (extend(4, "fourth"), Extend(number=3), extend(2, "second and longer")):
            assert await bus.control.send(job, extension) == "sent"
        pieces, result = await desk.result(job)
        at = [8, 16, 24, 32]
        texts = ["first", "second and longer", "", "fourth"]
        changes = [extend(n, text) if text else Extend(number=n) for n, text in enumerate(texts, 1)]
        assert text_of(pieces) == said(50, list(zip(at, changes, strict=True)))
        found = await applied(desk, job)
        assert [(each.tokens, each.extension) for each in found] == list(zip(at, changes, strict=True))  # fmt: skip
        assert (result.prompt_tokens, result.completion_tokens) == (100, 50)
        assert worker.no_page_held()
        outcomes = ("changed", "unchanged", "refused")
        name = "spillway_prompt_extensions_total"
        assert [worker.value(name, outcome=each) for each in outcomes] == [3, 1, 0]
        assert worker.value("spillway_prompt_extension_tokens_total", how="kept") >= 3 * 64
        assert worker.value("spillway_prompt_extension_wait_seconds_count") == 4
        assert await bus.control.state(job) == ([], False)


async def test_a_late_extension_is_kept_for_the_next_boundary(bus: Bus, desk: Desk) -> None:
    """A generation that is to keep takes the newest there is at a boundary, and goes on without where there is none."""
    rule = ExtensionRule(every=10, most=3, late="keep")
    async with running(bus) as worker:
        worker.runner.gate.clear()
        job = await desk.admit(work(PROMPT, max_new=60, extensions=rule))
        for number in (1, 3, 2):
            assert await bus.control.send(job, extend(number, f"text {number}")) == "sent"
        await heard(worker, job, 3)
        worker.runner.gate.set()
        pieces, _ = await desk.result(job)
        (found,) = await applied(desk, job)
        assert found.extension == extend(3, "text 3")
        assert found.tokens in {10, 20, 30}
        assert text_of(pieces) == said(60, [(found.tokens, found.extension)])
        plain = await desk.admit(work(PROMPT, max_new=60, extensions=rule))
        assert await desk.text(plain) == said(60, [])


async def test_pauses_and_extensions_at_any_token(bus: Bus, desk: Desk) -> None:
    """Without a rule a generation is extended between two steps; a pause, even of a queued job, ends as it should."""
    async with running(bus, HeldRunner(beta_s=0.003)) as worker:
        worker.runner.gate.clear()
        job = await desk.admit(work(PROMPT, max_new=300))
        assert await bus.control.send(job, Pause()) == "sent"
        worker.runner.gate.set()
        await paused(worker)
        other = await desk.admit(work("other", max_new=20))
        await desk.result(other)
        assert len(worker.scheduler.paused) == 1
        assert len(tokens_of(await desk.pieces(job))) < 200
        assert await bus.control.send(job, Pause(resume=True)) == "sent"
        await desk.until(job, 20)
        assert await bus.control.send(job, Pause()) == "sent"
        await paused(worker)
        held = worker.scheduler.paused[0]
        assert held.pages
        assert await bus.control.send(job, extend(1, "one")) == "sent"  # ends the pause
        pieces, _ = await desk.result(job)
        (found,) = await applied(desk, job)
        assert found.tokens >= 20
        assert text_of(pieces) == said(300, [(found.tokens, found.extension)])
        assert worker.no_page_held()


async def test_a_waiting_generation_ends(bus: Bus, desk: Desk) -> None:
    """A cancel and a deadline end a generation that waits; its session keeps the prompt and the part it asked for."""
    rule = ExtensionRule(every=8, most=2)
    async with running(bus) as worker:
        record = await made(desk)
        turn = asked(record, [], "p" * 100, max_new=50, keep=True, extensions=rule)
        job = await begin(desk, record, turn)
        await bus.control.send(job, extend(1, "slot"))
        await desk.until(job, 16)
        await paused(worker)
        assert await bus.control.cancel(job) == "flagged"
        assert (await desk.end(job)).kind == "cancelled"
        (kept,) = await Sessions(bus).turns(record.id)
        assert kept.prompt == extend(1, "slot").prompt(PROMPT)
        assert kept.answer == said(16, [(8, extend(1, "slot"))])
        late = await desk.admit(work(PROMPT, max_new=50, extensions=rule), seconds=1.5)
        assert (await desk.end(late)).kind == "expired"
        assert tokens_of(await desk.pieces(late)) == [*said(8, []).encode()]
        assert worker.no_page_held()


async def test_a_dead_letter_is_replayed_without_its_retrievals(
    bus: Bus,
    desk: Desk,
    config: Common,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody extends the prompt of a replayed job, so it waits at no boundary: its first passages are all it has."""
    monkeypatch.setenv("SPILLWAY_REDIS_URL", config.redis_url)
    prompt = [HeldRunner.POISON, *PROMPT]
    rule = ExtensionRule(every=8, most=2)
    async with running(bus) as worker:
        job = await desk.admit(work(prompt, max_new=40, extensions=rule))
        assert (await desk.end(job)).kind == "dead"
        worker.runner.POISON = -1
        words = ["dead-letters", "replay", job, "--timeout", "30"]
        assert await asyncio.to_thread(main.main, words) == 0
        told = capsys.readouterr().out.splitlines()  # the worker's log is among it
        assert (
            "written from the passages it began with; later ones were found by its request" in told
        )
        (again,) = [line.split()[0] for line in told if line.endswith("  result")]
        assert text_of(await desk.pieces(again)) == said(40, [], prompt)
        assert await DeadLetters(bus).count(FAMILY) == 0


async def test_a_session_remembers_the_last_prompt(bus: Bus, desk: Desk) -> None:
    """The next turn finds the pages of the last prompt and the answer; an extension of the history changes nothing."""
    rule = ExtensionRule(every=8, most=1)
    async with running(bus):
        record = await made(desk)
        first = asked(record, [], "p" * 100, max_new=60, extensions=rule)
        job = await begin(desk, record, first)
        await bus.control.send(job, extend(1, "slot"))
        await desk.result(job)
        (turn,) = await Sessions(bus).turns(record.id)
        assert turn.prompt == extend(1, "slot").prompt(PROMPT)
        history = [*turn.prompt, *turn.output]
        found = await Sessions(bus).get(record.id)
        assert found is not None
        assert found.tokens == len(history)
        job = await begin(desk, found, asked(found, history, "q", max_new=20, extensions=rule))
        await bus.control.send(job, extend(1, "not here"))
        pieces, result = await desk.result(job)
        assert result.cached_tokens == (len(history) - 1) // 32 * 32
        assert text_of(pieces) == said(20, [], [*history, *b"q"])


async def test_extensions_that_cannot_take_effect(bus: Bus, desk: Desk) -> None:
    """One that is too long, or outside of the prompt, is logged as one without a change; bad rules are refused."""
    rule = ExtensionRule(every=4, most=7)
    wrong = [
        Extend(number=1, start=70, tokens=[1] * 9000),
        Extend(number=2, start=70, tokens=[1] * 600),
        Extend(number=3, start=90, removed=11),
        Extend(number=4, removed=100),
        Extend(number=5, tokens=[1, 5000]),
        Extend(number=6, start=70, removed=10, tokens=[*b"0123456789"], spans=[(70, 75), (74, 80)]),
        Extend(number=7, start=70, removed=10, tokens=[*b"0123456789"], spans=[(95, 100)]),
    ]
    async with running(bus, HeldRunner(kv_bytes=16 * 4096)) as worker:
        job = await desk.admit(work(PROMPT, max_new=40, extensions=rule))
        for extension in wrong:
            assert await bus.control.send(job, extension) == "sent"
        assert await desk.text(job) == said(40, [])
        found = [(each.tokens, each.extension) for each in await applied(desk, job)]
        assert found == [(4 * n, Extend(number=n)) for n in range(1, 8)]
        assert worker.value("spillway_prompt_extensions_total", outcome="refused") == 7
        for bad, sentence in (
            (work(PROMPT, n=2, extensions=rule), "one choice"),
            (work(PROMPT, PROMPT, extensions=rule), "one prompt"),
            (work(PROMPT, extensions=ExtensionRule(every=0, most=1)), "1 or more tokens"),
            (work(PROMPT, spans=[(0, 5)]), "without the prompt's first and last token"),
            (work(PROMPT, spans=[(5, 9), (8, 12)]), "rising"),
            (work(PROMPT, PROMPT, spans=[(5, 9)]), "in one prompt"),
        ):
            event = await desk.end(await desk.admit(bad))
            assert (event.kind, event.code) == ("error", "invalid_request")
            assert sentence in event.message
        several = await desk.admit(work(PROMPT, n=2, max_new=300))
        await bus.control.send(several, extend(1, "no"))
        pieces, _ = await desk.result(several)
        assert len(tokens_of(pieces, 1)) == 300


async def test_a_waiting_generation_is_handed_over(
    bus: Bus, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draining worker hands a waiting job over at once; from its folded log the next repeats what took effect."""
    monkeypatch.setattr(job_module, "FOLD_EVERY", 4)
    rule = ExtensionRule(every=16, most=6)
    changes = [(16 * n, extend(n, f"number {n}")) for n in range(1, 7)]
    one = await Worker(bus).start(drain_s=60.0)
    job = await desk.admit(work(PROMPT, max_new=120, extensions=rule))
    for _, extension in changes[:3]:
        await bus.control.send(job, extension)
    await desk.until(job, 64)
    await paused(one)
    async with asyncio.timeout(30):  # the drain time has twice as much
        await one.stop()
    async with running(bus) as two:
        await paused(two)
        for _, extension in changes[3:]:
            await bus.control.send(job, extension)
        pieces, _ = await desk.result(job)
        assert two.no_page_held()
    assert text_of(pieces) == said(120, changes)
    found = await applied(desk, job)
    assert [(each.tokens, each.extension) for each in found] == changes
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert await bus.connection.call("EXISTS", keys.job(job)) == 1


@pytest.mark.parametrize("seed", range(2))
async def test_any_schedule(bus: Bus, desk: Desk, seed: int) -> None:
    """Messages at any time, in any order, with few pages and workers that come and go: each job's log says its text."""
    rng = random.Random(seed)
    rules = [
        ExtensionRule(rng.randint(3, 20), rng.randint(1, 5), late)
        for late in ("wait", "wait", "keep", "keep")
    ]
    runner = dict[str, float](beta_s=0.001, kv_bytes=20 * 4096)
    worker = await Worker(bus, HeldRunner(**runner)).start(drain_s=0.05)
    jobs = [await desk.admit(work(PROMPT, max_new=150, extensions=rule)) for rule in rules]
    sends = [
        (job, extend(number, f"{number} " * rng.randint(1, 60)))
        for job, rule in zip(jobs, rules, strict=True)
        for number in range(1, rule.most + 1)
    ]
    rng.shuffle(sends)
    for job, extension in sends:
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.3:
            await bus.control.send(rng.choice(jobs), Pause())
        await bus.control.send(job, extension)
        if rng.random() < 0.3:
            await worker.stop()
            worker = await Worker(bus, HeldRunner(**runner)).start(drain_s=0.05)
    for job in jobs:
        await bus.control.send(job, Pause(resume=True))
    for job, rule in zip(jobs, rules, strict=True):
        pieces, _ = await desk.result(job)
        found = [(each.tokens, each.extension) for each in await applied(desk, job)]
        assert text_of(pieces) == said(150, found)
        assert {tokens for tokens, _ in found} <= {rule.every * n for n in range(1, rule.most + 1)}
        numbers = [each.number for _, each in found]
        assert numbers == sorted(set(numbers))
        assert all((job, each) in sends for _, each in found)
        if rule.late == "wait":
            assert numbers == [tokens // rule.every for tokens, _ in found]
            assert len(found) == rule.most
    assert worker.no_page_held()
    await worker.stop()


async def test_a_replaced_passage_is_found_by_its_tenant_alone(bus: Bus, desk: Desk) -> None:
    """Passages that another answer had in the same prompt are not computed again, unless it was another tenant's.

    The counters of tokens kept and computed say so, and those of found tokens in the results.
    """
    slot = Extend(number=1, start=40, removed=20, tokens=[*b"the same passage" * 6])
    rule = ExtensionRule(every=8, most=1)
    name = "spillway_prompt_extension_tokens_total"
    async with running(bus) as worker:
        for scope, cached, keeps in (
            ("t", 0, 32),  # what is before the slot
            ("t", 96, 40 + 96 + 40),  # all of it
            ("another", 0, 32),
            ("another", 96, 40 + 96 + 40),
        ):
            before = worker.value(name, how="kept"), worker.value(name, how="computed")
            job = await desk.admit(work(PROMPT, max_new=16, extensions=rule, scope=scope))
            assert await bus.control.send(job, slot) == "sent"
            _, result = await desk.result(job)
            assert result.cached_tokens == cached
            more = worker.value(name, how="kept") - before[0]
            assert more == keeps // 32 * 32
            whole = 40 + 96 + 40 + 8
            assert worker.value(name, how="computed") - before[1] == whole - more
            assert worker.no_page_held()
