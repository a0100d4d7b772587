"""The scheduler against a simulator that sees every wrong page: invariants, order, sharing, windows, replay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages.identity import PAGE, page_id, page_ids, root_id
from engine.decoder.executor.interface import ModelShape
from engine.decoder.kv.eviction.policy import NAMES, Lru
from engine.decoder.kv.eviction.value import ValuePolicy
from engine.decoder.kv.page_pool import PagePool
from engine.decoder.kv.tiers import PageTiers, TierPolicy
from engine.decoder.scheduler import Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence
from tests.support.engine_simulator import Ask, Simulation, alone, prompts, some_spans

LONGEST = 200
WINDOWS: list[list[int | None]] = [
    [None], [None], [40], [7], [None, 33], [20, None], [None, 32, 100],
]  # fmt: skip


def shape(pages: int, windows: list[int | None], host_pages: int = 0) -> ModelShape:
    return ModelShape(windows, [1] * len(windows), pages, 1 << 20, 50, host_pages)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, StepLimits, list[Ask]]:
    """Random arrivals, lengths, page counts, windows and limits; every ask fits the pools alone."""
    windows = draw(st.sampled_from(WINDOWS))
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens = draw(st.sampled_from([1, 3, 16, 40, 100, 512]))
    count = draw(st.integers(1, 10))
    asks = [
        Ask(
            rng.randint(0, 12),
            prompt,
            rng.randint(1, 60),
            rng.randint(1, 60) if rng.random() < 0.2 else -1,
            rng.choice(["a", "a", "a", "b"]),
            spans=some_spans(rng, prompt) if not any(windows) else (),
        )
        for prompt in prompts(rng, count, LONGEST)
    ]
    least = max(-(-(len(ask.prompt) + ask.new) // PAGE) for ask in asks)
    pages = least + draw(st.sampled_from([0, 0, 1, 3, 10, 100]))
    host = draw(st.sampled_from([0, 0, 1, 5, 20, 200]))
    return (
        shape(pages, windows, host),
        StepLimits(tokens, draw(st.sampled_from([1, 2, 4, 64]))),
        asks,
    )


@given(cases())
def test_invariants(case: tuple[ModelShape, StepLimits, list[Ask]]) -> None:
    """No page leaks or has two owners, rows see what they must, first come first served, all end with their tokens."""
    run = Simulation(*case).run()

    for order, ask in enumerate(case[2]):
        output, expected = run.sequences[order].output, alone(ask)
        if ask.leaves < 0:
            assert output == expected
        else:
            assert output == expected[: len(output)]


@given(cases())
def test_replay(case: tuple[ModelShape, StepLimits, list[Ask]]) -> None:
    """The same arrivals give the same decisions, pages included."""
    assert Simulation(*case).run().history == Simulation(*case).run().history


def test_shared_prompts_are_computed_once() -> None:
    """Choices of one prompt, and a prompt that ended before, cost only their last page."""
    prompt = tuple(i % 50 for i in range(10 * PAGE + 5))
    asks = [Ask(0, prompt, 4) for _ in range(5)] + [Ask(40, prompt, 4)]
    run = Simulation(shape(100, [None]), StepLimits(64, 8), asks).run()

    assert run.computed <= len(prompt) + 5 * 5 + 6 * 4
    assert [sequence.cached for sequence in run.sequences] == [0] + [10 * PAGE] * 5


def test_other_scopes_share_nothing() -> None:
    """A tenant's pages are never another's."""
    prompt = tuple(i % 50 for i in range(4 * PAGE))
    run = Simulation(
        shape(100, [None]),
        StepLimits(512, 8),
        [Ask(0, prompt, 1, -1, "a"), Ask(5, prompt, 1, -1, "b")],
    ).run()

    assert [sequence.cached for sequence in run.sequences] == [0, 0]


def test_windowed_pages_leave() -> None:
    """Under a window a sequence of any length holds few pages, so a small pool serves it."""
    ask = Ask(0, tuple(i % 50 for i in range(900)), 30)
    run = Simulation(shape(12, [64]), StepLimits(64, 1), [ask]).run()

    assert run.sequences[0].output == alone(ask)


def test_decode_goes_on_beside_a_long_prompt() -> None:
    """A long prompt is cut into chunks; who decodes gets a token at every step meanwhile."""
    asks = [Ask(0, (1, 2, 3), 20), Ask(2, tuple(i % 50 for i in range(400)), 2)]
    run = Simulation(shape(100, [None]), StepLimits(32, 8), asks).run()

    steps = [step for step in run.history if any(part[0] == 0 for part in step)]
    assert len(steps) == 20
    assert run.history.index(steps[-1]) == 19


@pytest.mark.parametrize("low", [False, True])
def test_the_earliest_deadline_comes_first(*, low: bool) -> None:
    """Who is due sooner is admitted before who came sooner, and keeps its pages when they run out.

    What is of low priority comes last, however soon it is due.
    """
    scheduler = Scheduler(shape(8, [None]), StepLimits(512, 8))

    def one(order: int, due_ms: int) -> TokenSequence:
        prompt = [order] * (3 * PAGE)
        return TokenSequence(
            "j",
            0,
            order,
            prompt,
            root=root_id("0f", ""),
            most=4 * PAGE,
            due_ms=due_ms,
            low=low and order == 2,
        )

    late, soon, latest = one(0, 9000), one(1, 2000), one(2, 1000 if low else 9500)
    for sequence in (late, soon, latest):
        scheduler.add(sequence)
    steps = []
    while parts := scheduler.step():
        steps.append([part.sequence.order for part in parts])
        for part in parts:
            scheduler.commit(part, 1 if part.draws else None)
            if part.sequence.length == part.sequence.most:
                scheduler.drop([part.sequence])

    assert steps[0] == [1, 0]  # two of three fit
    assert soon.preempted == 0
    assert steps[-1] == [2]


def test_what_can_never_fit() -> None:
    """A sequence longer than the pools is known before it waits."""
    scheduler = Scheduler(shape(4, [None]), StepLimits(32, 8))

    def one(most: int) -> TokenSequence:
        return TokenSequence("j", 0, 0, [1], root=root_id("0f", ""), most=most)

    assert scheduler.fits(one(4 * PAGE))
    assert not scheduler.fits(one(4 * PAGE + 1))


def test_ids_name_content_and_history() -> None:
    """An id is a function of all tokens up to the page's end, of model and of scope."""
    tokens = list(range(3 * PAGE + 5))
    root = root_id("ab", "t")
    ids = page_ids(root, tokens)
    assert len(ids) == 3
    assert ids[1] == page_id(page_id(root, tokens[:PAGE]), tokens[PAGE : 2 * PAGE])
    assert page_ids(root, tokens, ids[:2]) == ids
    changed = [9, *tokens[1:]]
    assert not set(page_ids(root, changed)) & set(ids)
    assert not set(page_ids(root_id("ab", "u"), tokens)) & set(ids)
    assert not set(page_ids(root_id("abt", ""), tokens)) & set(ids)


def test_the_least_recently_released_page_goes_first() -> None:
    """Cached pages are found until they are needed, and given away in the order they were released."""
    pool = PagePool(3, Lru, float)
    pages = [pool.allocate() for _ in range(3)]
    for number, page in enumerate(pages):
        pool.publish(page, bytes([number]))
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    assert (pool.free, pool.used, pool.cached) == (0, 0, 3)
    pool.hold(pages[1])  # used again: no longer the oldest
    pool.release(pages[1])
    assert pool.allocate() == pages[0]
    assert pool.find(b"\0") is None
    assert pool.find(b"\1") == pages[1]
    pool.allocate()
    pool.allocate()
    with pytest.raises(IndexError, match="no page available"):
        pool.allocate()
    pool.check()


def test_a_step_chooses_once_among_the_cached_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All new pages of a step's rows are freed by one choice, since a choice looks at every conversation."""
    counts: list[int] = []
    choose = ValuePolicy.victims

    def counted(policy: ValuePolicy, count: int, now_s: float) -> list[bytes]:
        counts.append(count)
        return choose(policy, count, now_s)

    monkeypatch.setattr(ValuePolicy, "victims", counted)
    first = tuple(i % 50 for i in range(10 * PAGE))
    later = [tuple((i + 7 * n) % 50 for i in range(4 * PAGE)) for n in (1, 2)]
    asks = [Ask(0, first, 1), *(Ask(30, prompt, 1) for prompt in later)]
    Simulation(shape(12, [None]), StepLimits(512, 8), asks).run()

    assert counts == [6]  # eight pages, of which two were empty


@given(st.integers(0, 2**32), st.sampled_from([[None], [None, 40], [64]]))
def test_conversations_come_back_from_the_host(seed: int, windows: list[int | None]) -> None:
    """Turns that extend earlier ones find their pages in a larger host tier; none is used if damaged."""
    rng = random.Random(seed)
    asks, histories = [], [[rng.randrange(50) for _ in range(40)] for _ in range(6)]
    for turn in range(3):
        for number, history in enumerate(histories):
            ask = Ask(60 * (6 * turn + number), tuple(history), rng.randint(10, 60))
            asks.append(ask)
            history += [*alone(ask), *(rng.randrange(50) for _ in range(rng.randint(1, 40)))]
    run = Simulation(shape(14, windows, host_pages=100), StepLimits(64, 4), asks).run()

    assert [run.sequences[n].output for n in range(len(asks))] == [alone(ask) for ask in asks]
    assert run.loaded > 0 or None not in windows  # under a window alone the device has room for all
    assert run.damaged == run.scheduler.table.tiers.corrupt


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(list(NAMES)), st.integers(0, 1000))
def test_saving_comes_to_rest(pages: int, host_pages: int, policy: str, seed: int) -> None:
    """A host that is smaller than what lies idle on the device is not filled over and over."""
    tiers = PageTiers(shape(pages, [None], host_pages), TierPolicy(policy))
    rng, device = random.Random(seed), tiers.device[0]
    idle = [device.allocate() for _ in range(pages)]
    names = [bytes([number]) * 16 for number in range(pages)]
    for page, name in zip(idle, names, strict=True):
        device.publish(page, name)
    for length in range(0, pages, 5):
        tiers.history.end(names[length : length + 5], float(length))
    for page in rng.sample(idle, pages):
        device.release(page)
    made = 0
    while moves := tiers.saves(4):
        made += len(moves)
        for move in moves:
            tiers.moved(move, sound=True)
        assert made <= 3 * pages + host_pages
    tiers.check()


@pytest.mark.parametrize(("pages", "host_pages"), [(40, 5), (40, 1), (20, 1)])
@given(st.integers(0, 2**32))
def test_a_small_host_costs_few_pages(pages: int, host_pages: int, seed: int) -> None:
    """A host that drops what it has just been given does not make the device evict pages that are worth more."""
    tiers = PageTiers(shape(pages, [None], host_pages), TierPolicy("lru"))
    rng, device = random.Random(seed), tiers.device[0]
    names: list[bytes] = []  # the last used last
    used = lost = 0
    for turn in range(20 * pages):
        tiers.now_s = float(turn)
        if names and rng.random() < 0.3:
            used += 1
            name = names.pop(-rng.randint(1, min(len(names), pages)))
            if not tiers.has(0, name):
                lost += 1
                continue
            page, move = tiers.load(0, name)
            if move is not None:
                tiers.moved(move, sound=True)
        else:
            name, page = turn.to_bytes(16, "big"), device.allocate()
            device.publish(page, name)
        tiers.history.end([name], tiers.now_s)
        device.release(page)
        names.append(name)
        while moves := tiers.saves(rng.randint(1, 4)):
            for each in moves:
                tiers.moved(each, sound=True)
    tiers.check()

    assert lost <= 0.15 * used
