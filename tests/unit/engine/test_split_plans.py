"""Plans of steps whose sequences may be over both tiers: pages, inequalities, prices, and no going back and forth."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.rooflines import A10G, LLAMA_8B, RooflineMachine, costs
from common.pages.identity import CHUNK, PAGE
from engine.decoder.offload.costs import OffloadCosts
from engine.decoder.offload.plan import (
    SETTLE,
    DecodeState,
    HostHistory,
    OffloadLimits,
    OffloadPlan,
    OffloadState,
    PoolState,
    PromptState,
    SubBatch,
    pages_of,
)
from engine.decoder.offload.resume import ResumeFits, StepWork, choose_resume
from engine.decoder.offload.scheduler import STARVED, schedule

LIMITS = OffloadLimits(8192, 256, chunk=CHUNK)
MACHINES = (A10G["g5.4xlarge"], A10G["g5.16xlarge"])


@st.composite
def states(draw: st.DrawFn) -> OffloadState:
    """Draw queues of which some sequences have fronts, prompts that may have one, and pools that hold all pages."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    most = draw(st.sampled_from((40, 1000, 4000)))
    prompts, decoding = list[PromptState](), list[DecodeState]()
    used = {"device": 0, "host": 0}
    for order in range(draw(st.integers(0, 30))):
        length = rng.randint(1, most)
        front = CHUNK * rng.randint(0, (length - 1) // PAGE // CHUNK)
        if rng.random() < 0.3:
            prompt = _running(rng, order, length, front)
            if rng.random() < 0.7 and length > PAGE:
                prompt = _with_history(rng, order, length)
            used["device"] += prompt.pages
            used["host"] += (
                prompt.history.pages - prompt.history.idle + CHUNK * (prompt.front // CHUNK)
            )
            prompts.append(prompt)
            continue
        pages, settled = pages_of(length - 1), rng.randrange(2 * SETTLE)
        if rng.random() < 0.3:
            skipped = rng.randrange(STARVED)
            decoding.append(DecodeState(order, "host", length, pages, 0, 0, (), skipped, settled))
            used["host"] += pages
            continue
        front = front if rng.random() < 0.5 else 0
        decoding.append(
            DecodeState(order, "device", length, pages, front, settled=settled, front=front)
        )
        used["device"] += pages - front
        used["host"] += front
    longest = pages_of(most + 1)
    pools = (
        PoolState(max(longest, pages) + more, max(longest, pages) + more - pages)
        for pages, more in (
            (used[tier], rng.choice((0, 1, longest, 10 * longest))) for tier in ("device", "host")
        )
    )
    return OffloadState(tuple(prompts), tuple(decoding), *pools)


def _running(rng: random.Random, order: int, length: int, front: int) -> PromptState:
    """Return a prompt of which some rows are computed: at least those of its front."""
    done = rng.randint(front * PAGE, length - 1)
    front = front if done else 0
    return PromptState(
        order, ((done, length),), pages_of(done) - front, running=done > 0, front=front
    )


def _with_history(rng: random.Random, order: int, length: int) -> PromptState:
    """Return a prompt whose first pages are on the host, some of them on the device, too."""
    there = rng.randint(1, (length - 1) // PAGE)
    fetched = rng.randint(1, there)  # the last ones
    front, idle = there // CHUNK * CHUNK, rng.randint(0, there)
    later = max(0, there - max(front, there - fetched))
    ranges = ((there * PAGE, length),)
    alone = (((there - fetched) * PAGE, length),)
    history = HostHistory(
        there, idle, fetched, alone, 0, front, min(front, idle), later, later if front else 0
    )
    return PromptState(order, ranges, there - fetched, brought=fetched, history=history)


def _formula_s(state: OffloadState, plan: OffloadPlan, model: OffloadCosts) -> float:
    """Return the seconds of a plan by the text of the paper, with the fronts' attention in the host's first part."""
    decoding = {each.order: each for each in state.decoding}
    prompts = {each.order: each for each in state.prompts}
    fronts = {move.order: move.front for move in plan.moves}
    first, second = (*plan.batches, SubBatch(), SubBatch())[:2]
    there, pairs, coming = [0, 0], 0, 0
    for chunk in first.prompts:
        prompt = prompts[chunk.order]
        ranges = prompt.history.alone if chunk.resume == "recompute" else prompt.ranges
        positions = [position for start, end in ranges for position in range(start, end)]
        seen = sum(position + 1 for position in positions[: chunk.rows])
        if chunk.attended == "host":
            there = [there[0] + chunk.rows, there[1] + seen]
            continue
        if chunk.front:
            there = [there[0] + chunk.rows, there[1] + chunk.rows * chunk.front * PAGE]
        pairs += seen - chunk.rows * chunk.front * PAGE
        coming += prompt.history.pages if chunk.home == "host" else 0
    own = 0
    for order in first.device:
        one = decoding[order]
        front = fronts.get(order, one.front if one.home == "device" else 0)
        own += one.length - front * PAGE
        if front:
            there = [there[0] + 1, there[1] + front * PAGE]
    hosts = [[decoding[order].length for order in batch] for batch in (first.host, second.host)]
    ca0 = model.host_s(len(hosts[0]) + there[0], sum(hosts[0]) + there[1])
    ca1 = model.host_s(len(hosts[1]), sum(hosts[1]))
    ga0 = model.device_s(len(first.device), own)
    ga0 += model.prefill_s(sum(chunk.attended == "device" for chunk in first.prompts), pairs)
    ga0 += coming * model.page_s / model.layers
    l0, l1 = (model.linear.seconds(batch.rows) for batch in (first, second))
    copied = sum(move.pages for move in plan.moves)
    copied += sum(chunk.copied for chunk in first.prompts)
    layers_s = model.layers * (max(l0, ca1) + max(l1 + ga0, ca0))
    return model.step_s + max(layers_s, copied * model.page_s)


def _check_pages(state: OffloadState, plan: OffloadPlan) -> None:
    """Free pages of both pools cover what the plan takes, with what it frees."""
    free = {"device": state.device.free, "host": state.host.free}
    by_order: dict[int, Any] = {each.order: each for each in state.prompts}
    by_order |= {each.order: each for each in state.decoding}
    for order in plan.preempt:
        one = by_order[order]
        own = one.pages if isinstance(one, PromptState) else one.pages - one.front
        free[getattr(one, "home", "device")] += own
        free["host"] += one.front
    for move in plan.moves:
        one = by_order[move.order]
        assert (move.to, move.front) != (one.home, one.front)
        assert move.front % CHUNK == 0
        assert move.front <= (one.length - 1) // PAGE
        free[one.home] += one.pages - one.front
        free["host"] += one.front
        free[move.to] -= one.pages - move.front
        free["host"] -= move.front
        staying = one.front if move.to == "host" else 0
        assert move.pages >= (
            one.pages - staying if move.to != one.home else abs(one.front - move.front)
        )
    for batch in plan.batches:
        for chunk in batch.prompts:
            history = by_order[chunk.order].history
            free[chunk.home] -= chunk.pages
            free["host"] -= (
                history.front_idle if chunk.front and not by_order[chunk.order].running else 0
            )
        for tier, orders in (("device", batch.device), ("host", batch.host)):
            free[tier] -= sum(by_order[order].grows for order in orders)
    assert min(free.values()) >= 0


@settings(max_examples=250, deadline=None)
@given(
    states(), st.sampled_from(MACHINES), st.sampled_from((0.01, 1, 100)),
    st.sampled_from((1, 1000)),
)  # fmt: skip
def test_plans_over_both_tiers_keep_their_promises(
    state: OffloadState, machine: RooflineMachine, host: float, way: float
) -> None:
    """Pages, fronts of whole chunks, the inequalities, the price, a row for every sequence that the device has."""
    model = costs(machine, LLAMA_8B)
    model = model._replace(host=model.host.scaled(host), page_s=way * model.page_s)
    plan = schedule(state, LIMITS, model)
    decoding = {each.order: each for each in state.decoding}
    moved = {move.order: move for move in plan.moves}
    rows = [
        order
        for batch in plan.batches
        for order in (*(chunk.order for chunk in batch.prompts), *batch.device, *batch.host)
    ]

    assert plan == schedule(state, LIMITS, model)
    assert len(rows) == len(set(rows))
    _check_pages(state, plan)
    if rows:
        assert plan.seconds == pytest.approx(_formula_s(state, plan, model))
    for move in plan.moves:
        one = decoding[move.order]
        if move.to == one.home:  # a front leaves, or comes back: nobody who came lately
            assert one.settled >= SETTLE
            assert (one.front == 0) != (move.front == 0)
            assert move.order in rows
            assert move.front or not state.prompts
    assert len({(move.to, move.front > 0) for move in plan.moves} - {("host", False)}) <= 1
    assert not any(move.to == "device" and not move.front for move in plan.moves) or not any(
        move.to == "host" or move.front for move in plan.moves
    )
    for batch in plan.batches:
        for chunk in batch.prompts:
            assert (chunk.front > 0) == (
                chunk.resume == "split"
                or next(p for p in state.prompts if p.order == chunk.order).front > 0
            )
    if len(plan.batches) == 2:
        assert plan.times.long_slack_s >= 0 or plan.why == "overdue"
    if plan.why not in ("in place", "overdue"):
        assert min(plan.times.long_slack_s, plan.times.short_slack_s) >= 0
    for each in state.decoding:
        if each.home == "device":
            left = each.order in moved and moved[each.order].to == "host"
            assert each.order in rows or each.order in plan.preempt or left
    if state.prompts or state.decoding:
        assert rows or plan.preempt


@given(states())
def test_without_the_flag_nothing_gets_a_front(state: OffloadState) -> None:
    """Where plans may make no fronts, sequences on the device stay whole or leave wholly."""
    state = state._replace(
        prompts=tuple(
            each._replace(history=each.history._replace(front=0), front=0) for each in state.prompts
        ),
        decoding=tuple(each._replace(front=0) for each in state.decoding),
    )
    plan = schedule(state, LIMITS._replace(chunk=0), costs(A10G["g5.4xlarge"], LLAMA_8B))

    assert not any(move.front for move in plan.moves)
    assert not any(chunk.front for batch in plan.batches for chunk in batch.prompts)


def test_golden_fronts() -> None:
    """By hand: a question after 63 pages that the host has, and a sequence that must make room on the device."""
    alone = ((0, 2048),)
    history = HostHistory(63, 63, 63, alone, 0, 56, 56, 7, 7)
    prompt = PromptState(0, ((2016, 2048),), 0, brought=63, history=history)
    model = costs(A10G["g5.4xlarge"], LLAMA_8B)
    slow, fast = model._replace(page_s=10 * model.page_s), model.host.scaled(0.001)
    everywhere = ResumeFits(device=True, attending=frozenset({"device", "host"}), split=True)

    # Pages come in 13 ms beside 29 ms of weights: nothing is won by leaving them.
    fetched = choose_resume(prompt, StepWork(), everywhere, model)
    assert fetched is not None
    assert fetched.use == "fetch"
    # Over a link ten times slower they take 132 ms, attending 32 rows on a host of 200 GB/s 86, of which it waits 12 in
    # later steps; with the last 7 pages and the turn on the device it is 84.
    far = slow._replace(host=model.host.scaled(0.25))
    chosen = choose_resume(prompt, StepWork(), everywhere._replace(hidden=False), far)
    assert chosen is not None
    assert chosen.use == "split"
    assert chosen.seconds == pytest.approx(0.0835, rel=0.01)
    # So it is where the device has no room for the history, and has room for the turn: 8 pages instead of 64.
    small = OffloadState((prompt,), (), PoolState(60, 20), PoolState(8000, 8000))
    plan = schedule(small, LIMITS, far)
    [chunk] = plan.batches[0].prompts
    assert (chunk.resume, chunk.front, chunk.home) == ("split", 56, "device")
    assert (chunk.attended, chunk.pages, chunk.copied) == ("device", 8, 7)
    # A history without whole chunks at its beginning has no front.
    bare = prompt._replace(history=history._replace(front=0))
    chosen = choose_resume(bare, StepWork(), everywhere._replace(hidden=False), far)
    assert chosen is not None
    assert chosen.use != "split"

    # Eight sequences of 33 pages, each about to begin a page, and no page free: the last leaves 8 pages to the host.
    full = [DecodeState(order, "device", 33 * PAGE + 1, 33) for order in range(8)]
    tight = OffloadState((), tuple(full), PoolState(8 * 33, 0), PoolState(4000, 4000))
    plan = schedule(tight, LIMITS, model._replace(host=fast))
    assert [(move.order, move.to, move.front) for move in plan.moves] == [(7, "device", 8)]
    assert plan.batches[0].device == tuple(range(8))
    assert plan.why == "host beside device"
    # Where the host is slow the device would wait for it, so the sequence leaves wholly; so it does if it came lately.
    plan = schedule(tight, LIMITS, model._replace(host=model.host.scaled(100)))
    assert [(move.order, move.to, move.front) for move in plan.moves] == [(7, "host", 0)]
    lately = [each._replace(settled=0) for each in full]
    plan = schedule(tight._replace(decoding=tuple(lately)), LIMITS, model._replace(host=fast))
    assert [(move.to, move.front) for move in plan.moves] == [("host", 0)]
    # It gets its pages back once there is room for them.
    split = full[7]._replace(front=8, copies=8)
    ample = OffloadState((), (*full[:7], split), PoolState(400, 130), PoolState(4000, 3000))
    plan = schedule(ample, LIMITS, model._replace(host=fast))
    assert [(move.order, move.to, move.front, move.pages) for move in plan.moves] == [
        (7, "device", 0, 8)
    ]
