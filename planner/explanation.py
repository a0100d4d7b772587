"""Explanation of a schedule in plain words: placement, allocation, batching, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.execution import completions, pipeline_of
from planner.goals import Choice, Goals
from planner.inventory import Inventory
from planner.levers import helping
from planner.schedule_search import RagSchedule, SchedulePart, SearchSpace, parts

_NAMES = {"ttft": "the first token", "tpot": "the time between tokens", "qps": "requests/s"}


def placement(schedule: RagSchedule) -> str:
    """Return who shares chips, in a few words: db_encode+prefix:64 decode:8 retrieval:16."""
    groups = [f"{'+'.join(group.stages)}:{group.units}" for group in schedule.groups]
    return " ".join([*groups, *([f"retrieval:{schedule.hosts}"] if schedule.hosts else [])])


def batching(space: SearchSpace, schedule: RagSchedule) -> str:
    """Return the batch of every stage, in the order of the pipeline."""
    found = {
        name: batch
        for group in schedule.groups
        for name, batch in zip(group.stages, group.batches, strict=True)
    }
    found["retrieval"] = schedule.search_batch
    said = ", ".join(f"{name} {found[name]}" for name in space.schema.stages)
    return f"{said}, later retrievals {schedule.again}" if schedule.again else said


def spread(schedules: Sequence[RagSchedule], most: int) -> list[RagSchedule]:
    """Return at most so many of a front, two or more, spread over it, both ends among them."""
    if len(schedules) <= most:
        return list(schedules)
    last = len(schedules) - 1
    return [schedules[round(place * last / (most - 1))] for place in range(most)]


def explain(space: SearchSpace, choice: Choice, goals: Goals, *, fully: bool) -> Iterator[str]:
    """Yield the lines that explain a choice; `fully` also every part's rate, and the levers on what binds."""
    schedule = choice.schedule
    found = parts(space, schedule)
    yield from _placed(space.inventory, schedule)
    yield f"batches      {batching(space, schedule)}"
    yield f"first token  {_first_token(space, schedule)}"
    yield f"rate         {_rate(space, schedule, found)}"
    yield from _missed(schedule, choice, goals, found)
    if fully:
        yield ""
        yield from _table(space, schedule, found)
        yield _burst(space, schedule)
        yield from _levers(found[0])


def _units(inventory: Inventory, count: int) -> str:
    return f"{count} {inventory.resource}{'s' if count > 1 else ''}"


def _placed(inventory: Inventory, schedule: RagSchedule) -> Iterator[str]:
    said = []
    for group in schedule.groups:
        names = " and ".join(filter(None, [", ".join(group.stages[:-1]), group.stages[-1]]))
        verb = "share" if len(group.stages) > 1 else "has"
        own = "" if len(group.stages) > 1 else " of its own"
        said.append(f"{names} {verb} {_units(inventory, group.units)}{own}")
    if schedule.hosts:
        said.append(f"retrieval runs on {schedule.hosts} host{'s' if schedule.hosts > 1 else ''}")
    for place, line in enumerate(said):
        yield f"{'' if place else 'placement':<13}{line}"


def _part(part: SchedulePart) -> str:
    return "+".join(part.stages)


def _stage_latencies(space: SearchSpace, schedule: RagSchedule) -> dict[str, float]:
    """Return the seconds that each stage adds to the first token, in the order of the pipeline."""
    found = {
        name: space.profile(name, group.units, batch).latency_s
        for group in schedule.groups
        for name, batch in zip(group.stages, group.batches, strict=True)
    }
    if schedule.hosts:
        found["retrieval"] = space.profile(
            "retrieval", schedule.hosts, schedule.search_batch
        ).latency_s
    return {name: found[name] for name in space.schema.stages if name != "decode"}


def _first_token(space: SearchSpace, schedule: RagSchedule) -> str:
    shares = _stage_latencies(space, schedule)
    longest = sorted(shares, key=lambda name: -shares[name])
    said = ", ".join(
        f"{name} {1e3 * shares[name]:.4g} ms ({shares[name] / schedule.ttft_s:.0%})"
        for name in longest
    )
    return f"{1e3 * schedule.ttft_s:.4g} ms: {said}"


def _rate(space: SearchSpace, schedule: RagSchedule, found: Sequence[SchedulePart]) -> str:
    first = found[0]
    said = f"{schedule.qps:.4g} requests/s: {_part(first)} binds"
    for group in schedule.groups:
        if group.stages == first.stages and space.waits(group.stages):
            said += ", which waits for retrieval between its stages"
    if len(found) > 1:
        said += f"; the next is {_part(found[1])} with {found[1].qps:.4g}"
    return said


def _missed(
    schedule: RagSchedule, choice: Choice, goals: Goals, found: Sequence[SchedulePart]
) -> Iterator[str]:
    """Yield what a schedule that misses goals misses, and what binds there."""
    asked = {
        "ttft": f"{1e3 * goals.ttft_s:.4g} ms", "tpot": f"{1e3 * goals.tpot_s:.4g} ms",
        "qps": f"{goals.qps:.4g}",
    }  # fmt: skip
    given = {
        "ttft": f"{1e3 * schedule.ttft_s:.4g} ms", "tpot": f"{1e3 * schedule.tpot_s:.4g} ms",
        "qps": f"{schedule.qps:.4g}",
    }  # fmt: skip
    longest = max(found, key=lambda part: part.latency_s)
    binds = {"ttft": _part(longest), "tpot": "decode", "qps": _part(found[0])}
    for name, factor in choice.shortfalls.items():
        yield (
            f"missed       {_NAMES[name]}: {given[name]}, asked {asked[name]} ({factor:.2f} x); "
            f"{binds[name]} binds"
        )


def _table(
    space: SearchSpace, schedule: RagSchedule, found: Sequence[SchedulePart]
) -> Iterator[str]:
    yield f"{'part':<34}{'units':>7}{'requests/s':>12}{'used':>7}{'first token ms':>16}"
    for part in found:
        used = schedule.qps / part.qps
        yield (
            f"{_part(part):<34}{part.units:>7}{part.qps:>12.4g}{used:>7.0%}{1e3 * part.latency_s:>16.4g}"
        )
    charged, taken = schedule.chips, sum(group.units for group in schedule.groups)
    if charged != taken:
        host = "hosts bring along" if space.inventory.chips_per_host else "the search takes"
        yield f"charged: {_units(space.inventory, charged)}, with those that {host}"


def _burst(space: SearchSpace, schedule: RagSchedule) -> str:
    """Return how long a burst of the largest batch waits, which earlier stages fill batch by batch."""
    stages = pipeline_of(space, schedule)
    many = max(stage.batch for stage in stages)
    done = completions(stages, [0.0] * many)
    return (
        f"a burst of {many}, the largest batch: first tokens after {1e3 * sum(done) / many:.4g} ms, the last "
        f"after {1e3 * max(done):.4g}"
    )


def _levers(first: SchedulePart) -> Iterator[str]:
    levers = helping(first.stages)
    if levers:
        yield ""
        yield f"levers on {_part(first)} (--lever NAME plans with one):"
    for lever in levers:
        setting = (
            f"{lever.variable}={lever.value}" if lever.variable else f"one {lever.service} more"
        )
        yield f"  {lever.name:<15} {lever.does}; {setting}"
