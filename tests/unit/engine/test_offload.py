"""NEO's scheduler and its costs: pages, inequalities, waiting and homes in every state, and whole runs of requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.host_offload import OffloadSimulation, SimulatedRequest, synthetic
from bench.simulation.rooflines import A10G, LLAMA_7B, LLAMA_8B, T4, Machine, ModelSize, costs
from common.cost.linear import LinearCost, Probe
from common.cost.table import CostTable, OnlineTable
from common.pages.identity import PAGE
from engine.decoder.executor.interface import HelperLink
from engine.decoder.offload.costs import OffloadCosts, OffloadPoints, OffloadProfile, keep, kept
from engine.decoder.offload.plan import (
    SETTLE,
    DecodeState,
    OffloadLimits,
    OffloadMode,
    OffloadPlan,
    OffloadState,
    PoolState,
    PromptState,
    SubBatch,
    pages_of,
)
from engine.decoder.offload.scheduler import PATIENCE, STARVED, schedule

MACHINES = (A10G["g5.4xlarge"], A10G["g5.16xlarge"], T4[640])
LIMITS = OffloadLimits(8192, 256)


@st.composite
def states(draw: st.DrawFn) -> OffloadState:
    """Draw queues whose sequences hold the pages that their lengths need, and pools that hold them."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    most = draw(st.sampled_from((40, 400, 4000)))
    prompts, decoding = [], []
    for order in range(draw(st.integers(0, 40))):
        length = rng.randint(1, most)
        if rng.random() < 0.3:
            done = rng.randrange(length) if rng.random() < 0.3 else 0
            prompts.append(PromptState(order, ((done, length),), pages_of(done), done > 0))
            continue
        home = "host" if rng.random() < 0.5 else "device"
        pages = pages_of(length - 1)
        copies = rng.randint(0, pages) if rng.random() < 0.2 else 0
        skipped = rng.randrange(STARVED) if home == "host" else 0
        settled = rng.randrange(2 * SETTLE)
        decoding.append(
            DecodeState(order, home, length, pages, copies, skipped=skipped, settled=settled)  # type: ignore[arg-type]
        )
    used = {
        "device": sum(each.pages for each in decoding if each.home == "device")
        + sum(each.pages for each in prompts),
        "host": sum(each.pages for each in decoding if each.home == "host"),
    }
    longest = pages_of(most + 1)
    pools = {
        tier: max(longest, pages + rng.choice((0, 1, longest, 10 * longest)))
        for tier, pages in used.items()
    }
    device, host = (PoolState(pools[tier], pools[tier] - used[tier]) for tier in ("device", "host"))
    return OffloadState(tuple(prompts), tuple(decoding), device, host)


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
    pairs = 0
    for chunk in first.prompts:
        start = prompts[chunk.order].ranges[0][0]
        pairs += sum(position + 1 for position in range(start, start + chunk.rows))
    tokens = [
        [lengths[order] for order in batch] for batch in (first.host, second.host, first.device)
    ]
    ca0, ca1 = (model.host_s(len(each), sum(each)) for each in tokens[:2])
    ga0 = model.device_s(len(tokens[2]), sum(tokens[2]))
    ga0 += model.prefill_s(len(first.prompts), pairs)
    l0, l1 = (model.linear.seconds(batch.rows) for batch in (first, second))
    copied = sum(move.pages for move in plan.moves)
    copied += sum(chunk.pages for chunk in first.prompts if chunk.home == "host")
    layers_s = model.layers * (max(l0, ca1) + max(l1 + ga0, ca0))
    return model.step_s + max(layers_s, copied * model.page_s)


def _check_pages(state: OffloadState, plan: OffloadPlan) -> None:
    """Free pages of both pools cover what the plan takes, with what it frees."""
    free = {"device": state.device.free, "host": state.host.free}
    by_order: dict[int, Any] = {each.order: each for each in state.prompts}
    by_order |= {each.order: each for each in state.decoding}
    for order in plan.preempt:
        free[getattr(by_order[order], "home", "device")] += by_order[order].pages
    for move in plan.moves:
        one = by_order[move.order]
        assert move.to != one.home
        assert move.pages == one.pages - one.copies
        free[one.home] += one.pages
        free[move.to] -= move.pages
    for batch in plan.batches:
        for chunk in batch.prompts:
            free[chunk.home] -= chunk.pages
        for tier, orders in (("device", batch.device), ("host", batch.host)):
            free[tier] -= sum(by_order[order].grows for order in orders)
    assert min(free.values()) >= 0


@settings(max_examples=250)
@given(states(), st.sampled_from(MACHINES), st.sampled_from((2048, 8192)))
def test_a_plan_keeps_its_promises(state: OffloadState, machine: Machine, tokens: int) -> None:
    """Budgets, one row a sequence, attention where the home is, both inequalities, nobody starved, no slower choice."""
    model = LLAMA_7B if machine.name.startswith("T4") else LLAMA_8B
    limits = OffloadLimits(tokens, 256)
    priced = costs(machine, model)
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
    if plan.why != "overdue":
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
    assert not any(batch.host for batch in plan.batches) or plan.why == "host beside device"


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


@given(st.integers(0, 10_000), st.sampled_from(OffloadMode))
@settings(max_examples=15, deadline=None)
def test_whole_runs_end(seed: int, mode: OffloadMode) -> None:
    """All requests are served in every mode, in pools of a few sequences, and NEO keeps nobody waiting too long."""
    rng = random.Random(seed)
    tiny = ModelSize("tiny", 4, 4e8, 512, 2048)
    machine = Machine("", 20e9, 1e12, rng.choice((2e9, 8e9)), 4e9, 640, 1600)
    requests = [
        SimulatedRequest(rng.random(), rng.randint(1, 300), rng.randint(1, 120)) for _ in range(25)
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

    def gain(machine: Machine, model: ModelSize, prompt: int, output: int) -> float:
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
    assert profile.linear_took(512, 1.5 * true.linear.seconds(512)) == pytest.approx(1.5)
    next(tmp_path.iterdir()).write_text("{")
    assert kept(tmp_path, "this machine", "model") is None
