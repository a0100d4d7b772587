"""Schedules of a pipeline beside brute force, the thesis' figures, and what a schema or an inventory may not say."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation import rago_cases
from common.config import known_names
from planner.deployment import MachineFingerprint, read_plan, write_plan
from planner.explanation import explain
from planner.goals import Choice, Goals, Prices, choose, within
from planner.inventory import XPU_C, Host, Inventory, ProfilePoint, read_inventory
from planner.levers import LEVERS
from planner.planned_deployment import deployment, runnable_groups
from planner.rag_schema import (
    STAGES,
    InferenceStage,
    PlanInputError,
    RAGSchema,
    RagStage,
    RetrievalStage,
    read_schema,
)
from planner.schedule_search import (
    RagSchedule,
    ScheduledGroup,
    SearchSpace,
    best_schedules,
    every_schedule,
    front,
    idleness,
    parts,
    powers,
)
from planner.stage_profile import profile_of, retrieval_profile, step_s

BATCHES = (("retrieval", 2), ("decode", 4), *((name, 2) for name in STAGES[:6]), ("prefix", 2))
MACHINE = MachineFingerprint(cores=4, chips=0, memory_bytes=1 << 33, product="0.1.0")


def measured(draw: st.DrawFn, schema: RAGSchema, chips: int, hosts: int) -> list[ProfilePoint]:
    """Return a profile without any order in it: more units may be slower, larger batches faster."""
    times, shares = (
        st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0, 7.0]),
        st.sampled_from([0.05, 0.2, 0.5]),
    )
    return [
        ProfilePoint(name, units, batch, draw(times), batch / draw(times), draw(shares))  # type: ignore[arg-type]
        for name in schema.stages
        for units in powers(hosts if name == "retrieval" else chips)
        for batch in powers(dict(BATCHES)[name])
    ]


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Return small spaces of random schemas, inventories and profiles."""
    names = draw(st.sets(st.sampled_from(STAGES[:6]), max_size=3)) | {"prefix", "decode"}
    stages: dict[str, RagStage] = {
        name: RetrievalStage(rounds=draw(st.integers(1, 2)))
        if name == "retrieval"
        else InferenceStage(tokens=4)
        for name in STAGES
        if name in names
    }
    schema, chips, hosts = (
        RAGSchema(stages),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 2)),
    )
    inventory = Inventory(
        chips=chips,
        hosts=hosts,
        chips_per_host=draw(st.sampled_from([0, 4])),
        host_takes=draw(st.integers(0, 1)),
        scaling=draw(st.sampled_from(["shard", "replicate"])),
        decode=draw(st.sampled_from(["separate", "with_prefix"])),
        profile=measured(draw, schema, chips, hosts),
    )
    return SearchSpace(schema, inventory, profile_of(schema, inventory), BATCHES)


@settings(max_examples=25, deadline=None)
@given(spaces(), st.sampled_from([math.inf, 2.0, 8.0]), st.sampled_from([0.0, 0.1, 1.0]))
def test_pruned_equals_brute_force(space: SearchSpace, limit_s: float, qps: float) -> None:
    """The fronts are equal bit by bit, as is the cost of what reaches goals; no point of a front betters another."""
    every, best = [*every_schedule(space)], best_schedules(space)
    goals, prices = Goals(ttft_s=2 * limit_s, tpot_s=limit_s, qps=qps), Prices(1.0, 0.5)

    assert len(best) <= len(every)
    found = front(within(best, goals))
    assert [each.rank for each in found] == [each.rank for each in front(within(every, goals))]
    for one, other in itertools.combinations(found, 2):
        assert one.ttft_s < other.ttft_s
        assert one.qps_per_chip < other.qps_per_chip
    chosen, right = (choose(some, goals, prices) for some in (best, every))
    if chosen is None or right is None:
        assert chosen is right
        return
    assert _worth(chosen, goals, prices) == pytest.approx(_worth(right, goals, prices))
    slowest = parts(space, chosen.schedule)[0]
    assert slowest.qps == pytest.approx(chosen.schedule.qps)
    assert [*explain(space, chosen, goals, fully=True)]


def _worth(choice: Choice, goals: Goals, prices: Prices) -> tuple[float, float]:
    cost = prices.of(choice.schedule)
    worst = max(choice.shortfalls.values(), default=1.0)
    return worst, cost if goals.qps else cost / choice.schedule.qps


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1e9, 8e9, 70e9]), st.sampled_from([4, 8, 16]), st.sampled_from([16, 32]), st.booleans()
)  # fmt: skip
def test_more_chips_are_never_worse(params: float, chips: int, hosts: int, together: bool) -> None:
    """Whatever the smaller inventory can give, one with twice the chips can give too."""
    schema = rago_cases.hyperscale(params)
    fewer, more = (_small(schema, count, hosts, together=together) for count in (chips, 2 * chips))

    for each in fewer:
        assert any(
            other.ttft_s <= each.ttft_s and other.qps_per_chip >= each.qps_per_chip
            for other in more
        )


def _small(schema: RAGSchema, chips: int, hosts: int, *, together: bool) -> list[RagSchedule]:
    inventory = Inventory(
        chips=chips, hosts=hosts, chip="XPU-C", decode="with_prefix" if together else "separate"
    )
    limits = (("prefix", 4), ("retrieval", 32), ("decode", 64))
    return front(
        best_schedules(SearchSpace(schema, inventory, profile_of(schema, inventory), limits))
    )


# -- the thesis -----------------------------------------------------------------------------------


def test_the_search_of_the_thesis() -> None:
    """10.67 ms on 32 hosts, flat below 20 queries; 958 requests/s on 16, half for twice the queries."""
    stage, host = RetrievalStage(vectors=64e9, vector_bytes=96, scan=0.001), Host()

    one = retrieval_profile(stage, host, 32, 1)
    assert one.latency_s == pytest.approx(10.67e-3, abs=5e-6)
    assert retrieval_profile(stage, host, 32, 16).latency_s == one.latency_s
    assert retrieval_profile(stage, host, 16, 64).qps == pytest.approx(958.3, abs=0.1)
    twice = RetrievalStage(vectors=64e9, vector_bytes=96, scan=0.001, queries=2)
    assert retrieval_profile(twice, host, 16, 64).qps == pytest.approx(958.3 / 2, abs=0.1)
    assert [retrieval_profile(stage, host, hosts, 1).fits for hosts in (8, 16)] == [False, True]


def test_table_3_4() -> None:
    """The table's schedule gives 1.067 requests/s a chip (1.062 with attention), its baseline 0.648."""
    space = rago_cases.space(rago_cases.long_context(70e9))
    ways = [
        each
        for each in best_schedules(space)
        if [(group.stages, group.units) for group in each.groups]
        == [(("db_encode",), 64), (("prefix",), 16), (("decode",), 16)]
    ]

    assert max(each.qps_per_chip for each in ways) == pytest.approx(1.062, abs=0.002)
    best = front(best_schedules(space))[-1]
    slower = front(best_schedules(rago_cases.baseline(space.schema)))[-1]
    assert slower.qps_per_chip == pytest.approx(0.648, abs=0.001)
    assert best.qps_per_chip / slower.qps_per_chip == pytest.approx(1.7, abs=0.05)


def test_case_one_is_searched_by_brute_force() -> None:
    """On 16 chips the pruned front of case I is that of all schedules (on 128: row G2)."""
    for params in (1e9, 8e9):
        space = rago_cases.space(rago_cases.hyperscale(params, queries=2), chips=16)
        found = [each.rank for each in front(best_schedules(space))]

        assert found == [each.rank for each in front(every_schedule(space))]


# Figure 3.8b: the batch of later retrievals, the decode batch, and how much longer sequences take.
FIGURE_3_8B = (
    (1, 4, 1.00), (2, 4, 1.16), (2, 8, 1.07), (4, 8, 1.26), (4, 16, 1.11), (8, 16, 1.32), (8, 64, 1.06), (16, 64, 1.14),
    (16, 128, 1.06), (64, 128, 1.38), (64, 256, 1.15), (128, 256, 1.38),
)  # fmt: skip


@pytest.mark.parametrize(("waiting", "slots", "published"), FIGURE_3_8B)
def test_idleness_of_the_thesis(waiting: int, slots: int, published: float) -> None:
    """The closed form gives the published cells of batches up to half the slots."""
    assert idleness(waiting, slots) == pytest.approx(published, abs=0.02)


def test_the_best_batch_of_later_retrievals_is_in_the_interior() -> None:
    """Case III at a decode batch of 64: later retrievals neither one by one nor as many as can be."""
    schema = rago_cases.hyperscale(70e9, rounds=4)
    space = rago_cases.space(schema)
    best = max(
        (each for each in best_schedules(space) if each.groups[-1].batches == (64,)),
        key=lambda each: each.qps_per_chip,
    )

    assert 1 < best.again < 32


def test_a_step_of_decode() -> None:
    """The larger of operations and weights, and then the keys and values of every sequence."""
    stage = InferenceStage(params=8e9, tokens=256, context=512)

    alone = step_s(stage, XPU_C, 1, 1, 0)
    assert alone == pytest.approx(16e9 / 2765e9)
    assert step_s(stage, XPU_C, 1, 1, 768) - alone == pytest.approx(131072 * 768 / 2765e9)
    assert step_s(stage, XPU_C, 1, 1024, 0) == pytest.approx(2 * 8e9 * 1024 / 459e12)


# -- what may not be said -------------------------------------------------------------------------

PLAIN = "prefix: {params: 8e9, tokens: 512}, decode: {params: 8e9, tokens: 256}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expected `object`, got `null`; expected a mapping of stages, name"),
        ("stages: [", "while parsing"),
        ("name: fast", "missing required field `stages`"),
        ("stages: {decode: {}}", "stages.prefix is missing"),
        ("stages: {prefix: {}}", "stages.decode is missing"),
        (
            f"stages: {{{PLAIN}, guess: {{}}}}",
            "stages.guess is no stage; expected one of db_encode",
        ),
        (f"stages: {{{PLAIN}, rerank: {{params: -1}}}}", "stages.rerank: Expected `float` >= 0"),
        (f"stages: {{{PLAIN}, rerank: {{parms: 1}}}}", "unknown field `parms`; expected a mapping"),
        (f"stages: {{{PLAIN}, retrieval: {{scan: 2}}}}", "stages.retrieval: Expected `float` <= 1"),
        (
            "stages: {prefix: {after: decode}, decode: {}}",
            "cycle: prefix after decode after prefix",
        ),
        (
            f"stages: {{{PLAIN}, rerank: {{after: embed}}}}",
            "stages.rerank.after is embed, which is no",
        ),
        (
            "stages: {embed: {}, rerank: {after: embed}, prefix: {after: embed}, decode: {}}",
            "stages.prefix and stages.rerank both come after embed",
        ),
        ("stages: {prefix: {after: decode}, decode: {after: start}}", "prefix comes after decode"),
        (
            "stages: {retrieval: {rounds: 4}, prefix: {}, decode: {}}",
            "stages.decode.tokens is missing; expected the tokens of an answer",
        ),
    ],
)
def test_bad_schemas(text: str, why: str) -> None:
    """One sentence says where, what, and what is expected."""
    with pytest.raises(PlanInputError) as raised:
        read_schema(text.encode(), "rag.yaml")

    said = str(raised.value)
    assert said.startswith("rag.yaml: ")
    assert why in said
    assert "expected" in said
    assert "\n" not in said


def test_a_schema_in_another_order() -> None:
    """Stages follow what they say; numbers may be written as 8e9."""
    text = "stages: {rerank: {after: prefix}, prefix: {after: start, params: 8e9}, decode: {after: rerank}}"
    found = read_schema(text.encode(), "rag.yaml")

    assert list(found.stages) == ["prefix", "rerank", "decode"]
    assert found.inference("prefix").params == 8e9
    assert found.placed == ("prefix", "rerank")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("chips: 0\nhosts: 1\nchip: XPU-A", "chips is 0"),
        ("chips: 1\nhosts: 0\nchip: XPU-A", "hosts is 0"),
        ("chips: 1\nhosts: 1", "neither chip nor profile"),
        ("chips: 1\nhosts: 1\nchip: XPU-Z", "Invalid enum value 'XPU-Z'"),
        ("chips: 1\nhosts: 1\nchip: {flops: 1e12}", "missing required field `memory_bytes`"),
        ("chips: many\nhosts: 1", "Expected `int`"),
        ("hosts: 1", "missing required field `chips`"),
        ("chips: 1\nhosts: 1\nprofile: [{stage: guess}]", "Invalid enum value 'guess'"),
    ],
)
def test_bad_inventories(text: str, why: str) -> None:
    """One sentence says where, what, and what is expected."""
    with pytest.raises(PlanInputError) as raised:
        read_inventory(text.encode(), "here.yaml")

    assert str(raised.value).startswith("here.yaml: ")
    assert why in str(raised.value)
    assert "expected" in str(raised.value)


def test_a_profile_needs_its_sizes() -> None:
    """A roofline without a model's size, and a measured profile without a stage, say what is missing."""
    schema = RAGSchema({"prefix": InferenceStage(tokens=1), "decode": InferenceStage(tokens=1)})
    points = [ProfilePoint("prefix", 1, 1, 1.0, 1.0)]

    with pytest.raises(PlanInputError, match=r"stages\.prefix\.params is missing"):
        profile_of(schema, rago_cases.inventory())
    with pytest.raises(PlanInputError, match="profile has no point of decode"):
        profile_of(schema, Inventory(chips=1, hosts=1, profile=points))


# -- what runs it ---------------------------------------------------------------------------------


def test_levers_are_settings_of_the_product() -> None:
    """Every lever names a stage, and a variable that some service reads; one of weights changes what a step reads."""
    for lever in LEVERS:
        assert set(lever.stages) <= set(STAGES)
        assert not lever.variable or lever.variable.removeprefix("SPILLWAY_") in known_names()
    schema = rago_cases.rewritten(8e9)
    lighter = LEVERS[0].applied(schema)
    assert lighter.inference("decode").weight_bytes == 1.0
    assert lighter.inference("rerank") == schema.inference("rerank")


def product_space(
    stages: tuple[str, ...] = ("embed", "retrieval", "prefix", "decode"), **inventory: object
) -> SearchSpace:
    """Return the space of a small machine whose profile says that everything takes a second."""
    schema = RAGSchema(
        {
            name: RetrievalStage() if name == "retrieval" else InferenceStage(tokens=100)
            for name in stages
        }
    )
    points = [
        ProfilePoint(name, units, batch, 1.0, float(batch))  # type: ignore[arg-type]
        for name in stages for units in (1, 2) for batch in (1, 2)
    ]  # fmt: skip
    given = {
        "chips": 4,
        "hosts": 1,
        "resource": "core",
        "decode": "with_prefix",
        "machine": MACHINE,
    }
    found = Inventory(profile=points, **{**given, **inventory})  # type: ignore[arg-type]
    return SearchSpace(schema, found, profile_of(schema, found))


def test_a_schedule_as_a_deployment() -> None:
    """Groups are services with threads and batches; an embedder apart takes the embeddings; the file reads back."""
    space = product_space(host_takes=1)
    wanted = (ScheduledGroup(("embed",), 1, (2,)), ScheduledGroup(("prefix", "decode"), 2, (2, 2)))
    schedule = next(each for each in best_schedules(space) if each.groups == wanted)
    plan = deployment(space, schedule, [LEVERS[0]])

    assert {each.label: each.threads for each in plan.services} == {
        "router": 0, "kv_store": 0, "encoder": 1, "gpu_worker": 2, "vector_search": 1,
    }  # fmt: skip
    encoder, worker = plan.of_service("gpu_worker")
    assert encoder.settings == {"SPILLWAY_CHAT_MODEL": "none"}
    assert worker.settings == {
        "SPILLWAY_MAX_RUNNING": "2", "SPILLWAY_STEP_TOKENS": "200", "SPILLWAY_EMBED_MODEL": "none",
        "SPILLWAY_CHAT_DTYPE": "int8",
    }  # fmt: skip
    assert worker.device == "cpu"
    assert {group.service for group in plan.schedule} == {
        "encoder",
        "gpu_worker",
        "vector_search",
    }
    assert plan.predicted.qps == schedule.qps
    assert read_plan(write_plan(plan), "plan.json") == plan


def test_replicas_of_accelerators_and_overflow() -> None:
    """Accelerators that replicate are processes of their own; the lever of overflow adds a process."""
    space = product_space(resource="chip", scaling="replicate")
    schedule = next(
        each
        for each in best_schedules(space)
        if [group.units for group in each.groups] == [2] and len(each.groups[0].stages) == 3
    )
    overflow = next(lever for lever in LEVERS if lever.name == "overflow")
    plan = deployment(space, schedule, [overflow])

    assert {each.service: each.replicas for each in plan.services} == dict.fromkeys(
        ("router", "kv_store", "vector_search", "cpu_worker"), 1
    ) | {"gpu_worker": 2}
    assert plan.of_service("gpu_worker")[0].device == "auto"


def test_groups_that_services_run() -> None:
    """Generators have the prefix, encoders the embedding; every schedule of such groups has a deployment."""
    space = product_space(("rewrite_prefix", "embed", "rerank", "prefix", "decode"))
    groups = runnable_groups(space.schema)

    assert groups == {
        ("embed",), ("embed", "rerank"), ("prefix",), ("rerank", "prefix"), ("embed", "rerank", "prefix"),
        ("rewrite_prefix", "embed", "rerank", "prefix"),
    }  # fmt: skip
    space = product_space(("embed", "rerank", "prefix", "decode"))
    found = best_schedules(dataclasses.replace(space, placements=runnable_groups(space.schema)))
    assert {len(schedule.groups) for schedule in found} == {1, 2}
    for schedule in found:
        assert deployment(space, schedule).replicas("gpu_worker") == len(schedule.groups)


@pytest.mark.parametrize(
    ("stages", "inventory", "why"),
    [
        (("prefix", "decode"), {"machine": None}, "names no machine"),
        (("prefix", "decode"), {"decode": "separate"}, "decode on chips of its own"),
        (("prefix", "decode"), {"resource": "chip"}, "divides prefix, decode among 2 accelerators"),
        (("db_encode", "prefix", "decode"), {}, "expected no db_encode"),
        (("rewrite_prefix", "prefix", "decode"), {}, "has rewrite_prefix on its own"),
        (("rerank", "prefix", "decode"), {}, "has rerank on its own"),
    ],
)
def test_what_the_product_cannot_run(
    stages: tuple[str, ...], inventory: dict[str, object], why: str
) -> None:
    """A schedule that no service runs is refused in a sentence."""
    space = product_space(stages, **inventory)
    schedule = max(best_schedules(space), key=lambda each: (len(each.groups), each.groups[0].units))

    with pytest.raises(PlanInputError, match=why):
        deployment(space, schedule)
