"""NEO's scheduler and its costs: pages, inequalities, waiting and homes in every state, and whole runs of requests."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import ROOT
from bench.simulation.host_offload import OffloadRequest, OffloadRun, OffloadSimulation, synthetic
from bench.simulation.rooflines import (
    A10G,
    LLAMA_7B,
    LLAMA_8B,
    T4,
    ModelSize,
    RooflineMachine,
    costs,
)
from common.cost.linear import LinearCost, Probe
from common.cost.table import CostTable, OnlineTable
from common.pages.identity import PAGE
from engine.decoder.executor.interface import HelperLink
from engine.decoder.offload.costs import OffloadCosts, OffloadPoints, OffloadProfile, keep, kept
from engine.decoder.offload.plan import (
    SETTLE,
    DecodeState,
    HostHistory,
    OffloadLimits,
    OffloadMode,
    OffloadPlan,
    OffloadState,
    PoolState,
    PromptState,
    SharedPage,
    SubBatch,
    pages_of,
)
from engine.decoder.offload.resume import ResumeFits, StepWork, choose_resume, resume_choices
from engine.decoder.offload.scheduler import PATIENCE, STARVED, schedule

MACHINES = (A10G["g5.4xlarge"], A10G["g5.16xlarge"], T4[640])
LIMITS = OffloadLimits(8192, 256)


def measured_points(cell: str) -> OffloadPoints:
    """Return the stages' costs as they were measured on an H200, with so many cores beside it."""
    found = msgspec.json.decode((ROOT / "docs" / "benchmarks" / "gpu" / "neo.json").read_bytes())
    return msgspec.convert(found["cells"][cell]["points"], OffloadPoints)


@st.composite
def states(draw: st.DrawFn) -> OffloadState:
    """Draw queues whose sequences hold the pages that their lengths need, and pools that hold them."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    most = draw(st.sampled_from((40, 400, 4000)))
    longest_skip = rng.choice((PATIENCE, STARVED))  # beyond PATIENCE the host gets no prompt
    prompts, decoding = list[PromptState](), list[DecodeState]()
    elsewhere = {"device": 0, "host": 0}  # pages of histories that others hold
    for order in range(draw(st.integers(0, 40))):
        length = rng.randint(1, most)
        if rng.random() < 0.3:
            done = rng.randrange(length) if rng.random() < 0.3 else 0
            prompt = PromptState(order, ((done, length),), pages_of(done), done > 0)
            if not done and length > PAGE and rng.random() < 0.5:
                prompt = _with_history(rng, order, length)
                elsewhere["device"] += prompt.pages
                elsewhere["host"] += prompt.history.pages - prompt.history.idle
            prompts.append(prompt)
            continue
        home = "host" if rng.random() < 0.5 else "device"
        pages = pages_of(length - 1)
        copies = rng.randint(0, pages) if rng.random() < 0.2 else 0
        skipped = rng.randrange(longest_skip) if home == "host" else 0
        settled = rng.randrange(2 * SETTLE)
        decoding.append(
            DecodeState(order, home, length, pages, copies, skipped=skipped, settled=settled)  # type: ignore[arg-type]
        )
    decoding, saved = _sharing(rng, decoding)
    own = sum(each.pages for each in prompts if each.running)
    used = {
        tier: elsewhere[tier] + sum(e.pages for e in decoding if e.home == tier) - saved[tier]
        for tier in ("device", "host")
    }
    used["device"] += own
    longest = pages_of(most + 1)
    pools = {
        tier: max(longest + elsewhere[tier], pages + rng.choice((0, 1, longest, 10 * longest)))
        for tier, pages in used.items()
    }
    device, host = (PoolState(pools[tier], pools[tier] - used[tier]) for tier in ("device", "host"))
    return OffloadState(tuple(prompts), tuple(decoding), device, host)


def _with_history(rng: random.Random, order: int, length: int) -> PromptState:
    """Return a prompt of which the host has leading pages, some of them the device, too, and the device some more."""
    whole = (length - 1) // PAGE
    there = rng.randint(1, whole)
    fetched, copied = rng.randint(0, there), rng.randint(0, whole - there)
    done = (there + copied) * PAGE
    alone = ((0, fetched * PAGE), (done, length)) if fetched else ((done, length),)
    if fetched * PAGE == done:
        alone = ((0, length),)
    history = HostHistory(there, rng.randint(0, there), fetched, alone, copied)
    return PromptState(
        order, ((done, length),), there - fetched + copied, brought=fetched, history=history
    )


def _sharing(
    rng: random.Random, decoding: list[DecodeState]
) -> tuple[list[DecodeState], dict[str, int]]:
    """Let some sequences of one home share pages; return them, and how many pages that saves in each tier."""
    saved, first = {"device": 0, "host": 0}, 0
    for home in ("device", "host"):
        some = [each for each in decoding if each.home == home and each.pages and not each.copies]
        some = some[: rng.choice((0, 2, 3))]
        if len(some) < 2:
            continue
        most = min(each.pages for each in some)
        others = rng.randint(0, 1)  # such as a copy that is under way
        shared = tuple(
            SharedPage(first + at, len(some) + others, copied=False)
            for at in range(rng.randint(1, most))
        )
        first += len(shared)
        saved[home] = len(shared) * (len(some) - 1)
        decoding = [each._replace(shared=shared) if each in some else each for each in decoding]
    return decoding, saved


def _slower(model: OffloadCosts, name: str, factor: float) -> OffloadCosts:
    """Return costs of which one is so many times what it was."""
    was = getattr(model, name)
    if name == "page_s":
        return model._replace(page_s=factor * was)
    if name == "linear":
        return model._replace(linear=CostTable((rows, factor * s) for rows, s in was.points))
    return model._replace(**{name: was.scaled(factor)})


def _rows(plan: OffloadPlan) -> list[int]:
    return [
        order
        for batch in plan.batches
        for order in (*(chunk.order for chunk in batch.prompts), *batch.device, *batch.host)
    ]


def _formula_s(state: OffloadState, plan: OffloadPlan, model: OffloadCosts) -> float:
    """Return the seconds of a plan by the text of the paper, from the sequences that it names."""
    lengths = {each.order: each.length for each in state.decoding}
    prompts = {each.order: each for each in state.prompts}
    first, second = (*plan.batches, SubBatch(), SubBatch())[:2]
    pairs, coming, in_place = 0, 0, (0, 0)
    for chunk in first.prompts:
        prompt = prompts[chunk.order]
        ranges = prompt.history.alone if chunk.resume == "recompute" else prompt.ranges
        positions = [position for start, end in ranges for position in range(start, end)]
        seen = sum(position + 1 for position in positions[: chunk.rows])
        if chunk.attended == "host":
            in_place = in_place[0] + chunk.rows, in_place[1] + seen
            continue
        pairs += seen
        coming += prompt.history.pages if chunk.home == "host" else 0
    tokens = [
        [lengths[order] for order in batch] for batch in (first.host, second.host, first.device)
    ]
    ca0 = model.host_s(len(tokens[0]) + in_place[0], sum(tokens[0]) + in_place[1])
    ca1 = model.host_s(len(tokens[1]), sum(tokens[1]))
    ga0 = model.device_s(len(tokens[2]), sum(tokens[2]))
    own = sum(chunk.attended == "device" for chunk in first.prompts)
    ga0 += model.prefill_s(own, pairs) + coming * model.page_s / model.layers
    l0, l1 = (model.linear.seconds(batch.rows) for batch in (first, second))
    copied = sum(move.pages for move in plan.moves)
    copied += sum(chunk.copied for chunk in first.prompts)
    layers_s = model.layers * (max(l0, ca1) + max(l1 + ga0, ca0))
    staged_s = model.step_s + max(layers_s, copied * model.page_s)
    if first.prompts or first.host or second.host or plan.moves:
        return staged_s
    return model.whole_s(len(tokens[2]), sum(tokens[2]), staged_s)


def _check_pages(state: OffloadState, plan: OffloadPlan) -> None:
    """Free pages of both pools cover what the plan takes, with what it frees."""
    free = {"device": state.device.free, "host": state.host.free}
    by_order: dict[int, Any] = {each.order: each for each in state.prompts}
    by_order |= {each.order: each for each in state.decoding}
    left: Counter[SharedPage] = Counter()
    sent: set[SharedPage] = set()

    def leaves(order: int) -> None:
        one = by_order[order]
        shared = getattr(one, "shared", ())
        left.update(shared)
        last = sum(left[page] == page.holders for page in shared)
        free[getattr(one, "home", "device")] += one.pages - len(shared) + last

    for order in plan.preempt:
        leaves(order)
    for move in plan.moves:
        one = by_order[move.order]
        assert move.to != one.home
        assert move.pages == one.pages - one.copies - len(sent.intersection(one.shared))
        sent.update(one.shared)
        leaves(move.order)
        free[move.to] -= move.pages
    for batch in plan.batches:
        for chunk in batch.prompts:
            free[chunk.home] -= chunk.pages
            if chunk.home == "host":
                history = by_order[chunk.order].history
                assert (
                    chunk.pages
                    == pages_of(by_order[chunk.order].length) - history.pages + history.idle
                )
                assert chunk.rows == by_order[chunk.order].rows
        for tier, orders in (("device", batch.device), ("host", batch.host)):
            free[tier] -= sum(by_order[order].grows for order in orders)
    assert min(free.values()) >= 0


@settings(max_examples=250)
@given(
    states(), st.sampled_from(MACHINES), st.sampled_from((2048, 8192)),
    st.sampled_from(((1, 1), (300, 0.01), (1000, 1), (1000, 100))),
    st.sampled_from((None, LinearCost(1e-3, 1e-5, 1e-8), LinearCost(0.03, 0.0, 0.0))),
)  # fmt: skip
def test_a_plan_keeps_its_promises(
    state: OffloadState,
    machine: RooflineMachine,
    tokens: int,
    slower: tuple[float, float],
    whole: LinearCost | None,
) -> None:
    """Budgets, one row a sequence, attention where the home is, both inequalities, nobody starved, no slower choice.

    So it is where pages come and the host attends so many times `slower`, and where `whole` steps have another cost.
    """
    model = LLAMA_7B if machine.name.startswith("T4") else LLAMA_8B
    limits = OffloadLimits(tokens, 256)
    priced = _slower(_slower(costs(machine, model), "page_s", slower[0]), "host", slower[1])
    priced = priced._replace(whole=whole)
    plan = schedule(state, limits, priced)
    rows = _rows(plan)
    decoding = {each.order: each for each in state.decoding}
    moved: dict[int, str] = {move.order: move.to for move in plan.moves}

    assert plan == schedule(state, limits, priced)
    assert plan.examined <= 3 * len(decoding)
    if rows:
        assert plan.seconds == pytest.approx(_formula_s(state, plan, priced))
    assert len(rows) == len(set(rows))
    assert not set(rows) & set(plan.preempt)
    assert sum(batch.rows for batch in plan.batches) <= tokens
    _check_pages(state, plan)
    for batch in plan.batches:
        for tier, orders in (("device", batch.device), ("host", batch.host)):
            assert all(moved.get(order, decoding[order].home) == tier for order in orders)
    if len(plan.batches) == 2:
        assert not plan.batches[1].prompts
        assert not plan.batches[1].device
    if plan.why == "in place":
        assert plan.times.long_slack_s >= 0
        assert any(chunk.attended == "host" for chunk in plan.batches[0].prompts)
        assert plan.throughput >= plan.device_only
    elif plan.why != "overdue":
        assert min(plan.times.long_slack_s, plan.times.short_slack_s) >= 0
        assert plan.throughput >= plan.device_only
    served = {*rows, *plan.preempt}
    for each in state.decoding:
        must = each.home == "device" or each.skipped >= STARVED - 1
        assert not must or each.order in served or moved.get(each.order) == "host"
    if state.prompts or state.decoding:
        assert rows or plan.preempt


@given(states())
def test_homes_do_not_ping_pong(state: OffloadState) -> None:
    """Who came lately stays: on the host always, on the device while another can go; a move to the host has no row."""
    plan = schedule(state, LIMITS, costs(A10G["g5.4xlarge"], LLAMA_8B))
    decoding = {each.order: each for each in state.decoding}
    left = {*plan.preempt, *(move.order for move in plan.moves)}
    for move in plan.moves:
        one = decoding[move.order]
        if move.to == "device":
            assert one.settled >= SETTLE
            assert one.skipped >= PATIENCE or not state.prompts
        elif one.settled < SETTLE:
            others = [e for e in state.decoding if e.home == "device" and e.order not in left]
            assert all(each.settled < SETTLE for each in others)
        assert (move.order in _rows(plan)) is (move.to == "device")
    directions = {move.to for move in plan.moves}
    assert len(directions) <= 1


def test_the_way_to_a_helper_is_reckoned_with() -> None:
    """Rows and pages cost what they take over the link, too; over one that is too slow the host gets nothing to do."""
    near = costs(A10G["g5.16xlarge"], LLAMA_8B)
    link = HelperLink("tcp", LinearCost(1e-3, 0.0, 1e-9), 1 << 20, 1 << 22)
    far = near.over(link)

    assert far.host_s(8, 100) == pytest.approx(near.host_s(8, 100) + 1e-3 + 8 * (1 << 20) * 1e-9)
    assert far.page_s == pytest.approx(near.page_s + (1 << 22) * 1e-9)
    assert far.host_s(0, 0) == 0.0
    assert near.over(HelperLink("unix")) == near
    decoding = tuple(
        DecodeState(order, "host" if order % 2 else "device", 500, pages_of(499))
        for order in range(64)
    )
    prompts = (PromptState(64, ((0, 2000),)),)
    state = OffloadState(prompts, decoding, PoolState(4000, 2000), PoolState(4000, 2000))
    by_way = [
        sum(len(batch.host) for batch in schedule(state, LIMITS, each).batches)
        for each in (near, near.over(link._replace(cost=LinearCost(10.0, 0.0, 0.0))))
    ]
    assert by_way[0] > 0 == by_way[1]


@given(states(), st.sampled_from(OffloadMode))
def test_every_mode_plans_within_the_pages(state: OffloadState, mode: OffloadMode) -> None:
    """Every mode keeps to the pools and to the homes; `device` and `swap` leave nothing to the host's processor."""
    plan = schedule(state, LIMITS, costs(A10G["g5.4xlarge"], LLAMA_8B), mode)

    _check_pages(state, plan)
    assert len(_rows(plan)) == len(set(_rows(plan)))
    if mode in (OffloadMode.DEVICE, OffloadMode.SWAP):
        assert plan.times.host == (0.0, 0.0)
    if mode is OffloadMode.DEVICE:
        assert not any(chunk.home == "host" for b in plan.batches for chunk in b.prompts)
        assert not any(move.to == "host" for move in plan.moves)


@settings(max_examples=60)
@given(states(), st.floats(0.03, 0.4))
def test_a_step_keeps_its_latency(state: OffloadState, step_s: float) -> None:
    """No step is longer than the limit but for the device's own rows, a page of a prompt, or those who are overdue."""
    model = costs(A10G["g5.4xlarge"], LLAMA_8B)
    plan = schedule(state, OffloadLimits(8192, 256, step_s), model)
    if plan.why == "overdue" or plan.seconds <= step_s or plan.moves:
        return
    assert sum(chunk.rows for batch in plan.batches for chunk in batch.prompts) <= PAGE
    in_place = any(chunk.attended == "host" for b in plan.batches for chunk in b.prompts)
    beside = plan.why == "host beside device" or in_place
    assert beside or not any(batch.host for batch in plan.batches)


def test_a_small_step_is_refused() -> None:
    """A step must have a row for every sequence."""
    empty = OffloadState((), (), PoolState(8, 8), PoolState(8, 8))
    model = costs(A10G["g5.4xlarge"], LLAMA_8B)
    with pytest.raises(ValueError, match="too small"):
        schedule(empty, OffloadLimits(4, 8), model)
    assert schedule(empty, LIMITS, model) == OffloadPlan()


def test_golden_choices() -> None:
    """Three states by hand: nothing for the host; a prompt that covers the host's work; decode alone that does not."""
    model = costs(A10G["g5.4xlarge"], LLAMA_8B)
    pools = PoolState(1250, 400), PoolState(8000, 7000)
    device = [DecodeState(n, "device", 1001, 32) for n in range(20)]
    host = [DecodeState(n, "host", 1001, 32) for n in range(20, 60)]
    prompt = PromptState(99, ((0, 1000),))

    alone = schedule(OffloadState((prompt,), tuple(device), *pools), LIMITS, model)
    assert (alone.why, [batch.rows for batch in alone.batches]) == ("device only", [1020])
    both = schedule(OffloadState((prompt,), (*device, *host), *pools), LIMITS, model)
    assert (both.why, [batch.rows for batch in both.batches]) == ("two batches", [1020, 40])
    many = [*device, *(DecodeState(n, "device", 1001, 32) for n in range(60, 80))]
    few = schedule(OffloadState((), (*many, *host), PoolState(1280, 20), pools[1]), LIMITS, model)
    # 40 rows of 1,001 tokens take 347 us a layer on the device, three of them 299 us on the host, four 382.
    assert (few.why, [len(batch.host) for batch in few.batches]) == ("host beside device", [3])
    # Without the prompt 40 rows more do not pay for reading the weights twice; half as many on the device, and they do.
    half = schedule(
        OffloadState((), (*device, *host), PoolState(1250, 20), pools[1]), LIMITS, model
    )
    assert (half.why, len(half.batches)) == ("two batches", 2)


# -- histories on the host -------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[PromptState, StepWork, OffloadCosts]:
    """Draw a prompt of which only the host has pages, the work of the step beside it, and costs of some machine."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    prompt = _with_history(rng, 0, rng.randint(PAGE + 1, 4000))
    while not prompt.history.fetched:
        prompt = _with_history(rng, 0, rng.randint(PAGE + 1, 4000))
    beside = StepWork(rng.choice((0, rng.randrange(500))), 1e-4 * rng.random(), 1e-4 * rng.random())
    model = costs(draw(st.sampled_from(MACHINES)), LLAMA_8B)
    for name in ("host", "page_s", "linear"):
        model = _slower(model, name, 10 ** rng.uniform(-3, 3))
    return prompt, beside, model


FITS = st.builds(
    ResumeFits, st.booleans(), st.frozensets(st.sampled_from(("device", "host"))), st.booleans()
)


@given(histories(), FITS)
def test_the_cheapest_use_of_a_history_that_fits_is_chosen(
    drawn: tuple[PromptState, StepWork, OffloadCosts], fits: ResumeFits
) -> None:
    """Nothing is chosen that does not fit, none is cheaper of what fits, and something is chosen if anything fits."""
    prompt, beside, model = drawn
    ways = resume_choices(prompt, beside, model, hidden=fits.hidden)
    fitting = [
        way
        for way in ways
        if (way.use == "attend" and way.attended in fits.attending)
        or (way.use != "attend" and fits.device)
    ]
    chosen = choose_resume(prompt, beside, fits, model)

    assert {way.use for way in ways} == {"attend", "fetch", "recompute"}
    assert (chosen is None) is (not fitting)
    if chosen is not None:
        assert chosen in fitting
        assert chosen.seconds == min(way.seconds for way in fitting)
        assert chosen.seconds >= beside.seconds(model)


@given(
    histories(), FITS, st.sampled_from(("host", "exchange", "page_s", "linear", "prefill")),
    st.floats(1, 1000),
)  # fmt: skip
def test_a_choice_follows_the_costs(
    drawn: tuple[PromptState, StepWork, OffloadCosts],
    fits: ResumeFits,
    name: str,
    factor: float,
) -> None:
    """No way is cheaper where something takes longer, and what takes longer is not what is chosen for it.

    A slower host attends to nothing more, slower pages are not fetched where they were computed before, and slower
    computing computes nothing that was fetched before.
    """
    prompt, beside, model = drawn
    slower = _slower(model, name, factor)
    before, after = (
        resume_choices(prompt, beside, each, hidden=fits.hidden) for each in (model, slower)
    )
    for was, now in zip(before, after, strict=True):
        assert now.seconds >= was.seconds * (1 - 1e-9)
    first, then = (choose_resume(prompt, beside, fits, each) for each in (model, slower))
    if first is None or then is None:
        assert first == then
    elif name in ("host", "exchange"):
        assert (then.use, then.attended) != ("attend", "host") or first[:2] == then[:2]
    elif name == "page_s":
        assert (first.use, then.use) != ("recompute", "fetch")
    else:
        assert (first.use, then.use) != ("fetch", "recompute")


def test_golden_histories() -> None:
    """By hand, a question of 32 tokens after 2,016 that the host has: each use where it is the cheapest."""
    alone = ((0, 2048),)
    prompt = PromptState(0, ((2016, 2048),), 0, brought=63, history=HostHistory(63, 63, 63, alone))
    model = costs(A10G["g5.4xlarge"], LLAMA_8B)
    everywhere = ResumeFits(device=True, attending=frozenset({"device", "host"}))
    idle = StepWork()

    def choice(costs: OffloadCosts, beside: StepWork = idle) -> tuple[str, str] | None:
        chosen = choose_resume(prompt, beside, everywhere, costs)
        return chosen and chosen[:2]

    # Weights take 29 ms to read; 63 pages come in 13 ms beside them.
    assert choice(model) == ("fetch", "device")
    # Over a link ten times slower they take 132 ms, computing all rows anew 477, attending 32 rows on the host 202.
    slow = _slower(model, "page_s", 10)
    assert choice(slow) == ("fetch", "device")
    # With a host of 200 GB/s that takes 74 ms.
    assert choice(_slower(slow, "host", 0.25)) == ("attend", "host")
    # Where the link is a hundred times slower still, and the host slow, computing is all that is left.
    assert choice(_slower(_slower(slow, "page_s", 100), "host", 10)) == ("recompute", "device")

    # In a step of its own the device waits for the host; behind a prompt of 1,000 rows the pages come unnoticed.
    state = OffloadState((prompt,), (), PoolState(1250, 1250), PoolState(8000, 8000))
    fast = _slower(slow, "host", 0.05)
    own = schedule(state, LIMITS, fast)
    assert (own.why, own.batches[0].prompts[0].attended) == ("in place", "host")
    assert own.batches[0].prompts[0].pages == 64
    other = PromptState(1, ((0, 1000),))
    both = schedule(state._replace(prompts=(other, prompt)), LIMITS, fast)
    assert [chunk.resume for chunk in both.batches[0].prompts] == [None, "fetch"]


@given(st.integers(0, 10_000), st.sampled_from(OffloadMode))
@settings(max_examples=15, deadline=None)
def test_whole_runs_end(seed: int, mode: OffloadMode) -> None:
    """All requests are served in every mode, in pools of a few sequences, and NEO keeps nobody waiting too long."""
    rng = random.Random(seed)
    tiny = ModelSize("tiny", 4, 4e8, 512, 2048)
    machine = RooflineMachine("", 20e9, 1e12, rng.choice((2e9, 8e9)), 4e9, 640, 1600)
    requests = [
        OffloadRequest(rng.random(), rng.randint(1, 300), rng.randint(1, 120)) for _ in range(25)
    ]
    run = OffloadSimulation(
        requests, OffloadLimits(512, 64), costs(machine, tiny), (640, 1600), mode
    ).run()

    assert len(run.latencies_s) == len(requests)
    assert run.tokens == sum(each.prompt + each.output for each in requests)
    if mode is OffloadMode.ASYMMETRIC:
        assert run.longest_skip < STARVED


def test_the_gain_is_that_of_the_check() -> None:
    """As in the paper's analysis a host helps where the device's pages are few, and more bandwidth helps more."""

    def gain(machine: RooflineMachine, model: ModelSize, prompt: int, output: int) -> float:
        tokens = machine.device_tokens, machine.host_tokens
        work, model_costs = synthetic(120, prompt, output, 1), costs(machine, model)
        alone, neo = (
            OffloadSimulation(work, LIMITS, model_costs, tokens, mode).run().throughput
            for mode in (OffloadMode.DEVICE, OffloadMode.ASYMMETRIC)
        )
        return neo / alone

    assert 1.05 < gain(A10G["g5.4xlarge"], LLAMA_8B, 1000, 100) < 1.2
    assert gain(A10G["g5.16xlarge"], LLAMA_8B, 1000, 100) > gain(
        A10G["g5.4xlarge"], LLAMA_8B, 1000, 100
    )
    assert gain(T4[640], LLAMA_7B, 250, 50) > gain(T4[2400], LLAMA_7B, 250, 50) > 1.3


@pytest.mark.parametrize("cores", [4, 16])
def test_stages_that_cost_more_than_the_host_gives_are_not_begun(cores: int) -> None:
    """On an H200, measured, a step in stages takes five times one in one piece: NEO is no slower than the device alone.

    By the costs of stages only it would take the host's help at half of the speed.
    """
    staged = measured_points(f"costs/{cores} cores")
    steps = [(1, 5.65e-3), (8, 6.44e-3), (64, 9.33e-3), (256, 18.3e-3)]
    known = msgspec.structs.replace(staged, whole=[Probe(n, 320 * n, s) for n, s in steps])
    true = OffloadProfile(known).costs
    work = synthetic(48, 1000, 128, 1)

    def served(points: OffloadPoints, mode: OffloadMode) -> OffloadRun:
        tokens, profile = (4384, 64_000), OffloadProfile(points)
        return OffloadSimulation(
            work, OffloadLimits(2048, 48), true, tokens, mode, profile=profile
        ).run()

    alone = served(known, OffloadMode.DEVICE)
    neo, blind = served(known, OffloadMode.ASYMMETRIC), served(staged, OffloadMode.ASYMMETRIC)
    assert blind.on_host > 0
    assert blind.throughput < 0.8 * alone.throughput
    assert neo.throughput > 0.97 * alone.throughput


def test_stages_that_cost_little_more_still_gain() -> None:
    """On an A10G, by rooflines, a step in one piece that saves 3 of 33 ms leaves most of the host's gain."""
    machine = A10G["g5.16xlarge"]
    model = costs(machine, LLAMA_8B)
    row_s, token_s = model.linear.seconds(1), model.device.alpha_tokens_s
    whole_s = model.step_s + model.layers * (row_s + model.device.beta_s) - 3e-3
    priced = model._replace(whole=LinearCost(whole_s, 0.0, model.layers * token_s))
    tokens, work = (machine.device_tokens, machine.host_tokens), synthetic(120, 1000, 100, 1)
    alone, neo = (
        OffloadSimulation(work, LIMITS, priced, tokens, mode).run()
        for mode in (OffloadMode.DEVICE, OffloadMode.ASYMMETRIC)
    )
    assert neo.on_host > 0
    assert neo.throughput > 1.1 * alone.throughput


def test_a_lonely_conversation_leaves_the_host_where_stages_take_longer() -> None:
    """Its history is attended in place only where that makes no later step slower."""
    alone = ((0, 2048),)
    prompt = PromptState(0, ((2016, 2048),), 0, brought=63, history=HostHistory(63, 63, 63, alone))
    state = OffloadState((prompt,), (), PoolState(1250, 1250), PoolState(8000, 8000))
    model = costs(A10G["g5.4xlarge"], LLAMA_8B)
    slow = _slower(_slower(model, "page_s", 10), "host", 0.05)
    homes = [
        schedule(state, LIMITS, slow._replace(whole=whole)).batches[0].prompts[0].home
        for whole in (None, LinearCost(1e-3, 0.0, 0.0))
    ]
    assert homes == ["host", "device"]


# -- costs -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 999), st.floats(1e-6, 10)), min_size=1, max_size=20))
def test_a_table_never_falls(points: list[tuple[int, float]]) -> None:
    """Seconds rise with the size, also beyond the points, and a point's are at least a smaller point's median."""
    table = CostTable(points)
    found = [table.seconds(size) for size in range(1, 1200, 7)]

    assert found == sorted(found)
    assert table.seconds(0) == 0.0
    for size, seconds in table.points:
        assert table.seconds(size) == pytest.approx(seconds)


def test_a_table_follows_the_machine() -> None:
    """A machine that becomes twice as slow is learned where it is measured; one far outlier changes little."""
    table = OnlineTable([(1, 1.0), (10, 2.0), (100, 20.0)])
    table.observe(100, 2000.0)
    assert table.table.seconds(100) < 30
    for _ in range(100):
        table.observe(7, 4.0)
    assert table.table.seconds(7) == pytest.approx(4.0, rel=0.02)
    with pytest.raises(ValueError, match="points"):
        CostTable([])


def test_a_profile_is_kept_and_learns(tmp_path: Path) -> None:
    """Points are found again for the same machine and model only; stages that take longer change the costs."""
    true = costs(A10G["g5.4xlarge"], LLAMA_8B)
    sizes = [(1, 100), (4, 4000), (16, 16000), (64, 32000)]
    probes = [Probe(n, t, true.host.seconds(n, t)) for n, t in sizes]
    table = list(true.linear.points)
    points = OffloadPoints(32, table, probes, probes, probes, probes, page_s=1e-4, step_s=1e-3)
    keep(tmp_path, "this machine", "model", points)

    assert kept(tmp_path, "this machine", "model") == points
    assert kept(tmp_path, "another", "model") is None
    profile = OffloadProfile(points)
    assert profile.costs.host.seconds(8, 9000) == pytest.approx(true.host.seconds(8, 9000))
    for _ in range(300):
        for items, tokens in sizes:
            profile.attention_took("host", items, tokens, 2 * true.host.seconds(items, tokens))
    assert profile.costs.host.seconds(8, 9000) == pytest.approx(
        2 * true.host.seconds(8, 9000), rel=0.05
    )
    profile.whole_took(8, 9000, 1.0)
    assert profile.costs.whole is None
    whole = [Probe(n, t, 2 * true.device.seconds(n, t)) for n, t in sizes]
    profile = OffloadProfile(msgspec.structs.replace(points, whole=whole))
    assert profile.costs.whole_s(8, 9000, 9.9) == pytest.approx(2 * true.device.seconds(8, 9000))
    for _ in range(300):
        for items, tokens in sizes:
            profile.whole_took(items, tokens, 4 * true.device.seconds(items, tokens))
    assert profile.costs.whole_s(8, 9000, 9.9) == pytest.approx(
        4 * true.device.seconds(8, 9000), rel=0.05
    )
    assert profile.linear_took(512, 1.5 * true.linear.seconds(512)) == pytest.approx(1.5)
    next(tmp_path.iterdir()).write_text("{")
    assert kept(tmp_path, "this machine", "model") is None
