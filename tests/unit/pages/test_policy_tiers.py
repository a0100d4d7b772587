"""Policies where they are used: two tiers under conversations, traces, the row of the benchmarks at reduced size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.document import BenchOptions
from bench.partial import PartialResults
from bench.simulation import kv_loads, kv_rule, kv_traces
from bench.simulation.kv_simulation import TierSetting, TierSimulation
from bench.suites import p5
from engine.decoder.kv.eviction.policy import NAMES

SMALL = TierSetting(rate=4.0, host_pages=500, device_pages=1638, conversations=250)


def test_tiers_account_for_every_page() -> None:
    """All policies meet the same load; what is not held is recomputed, leading pages more cheaply."""
    found = {name: TierSimulation(name, SMALL, 1).run() for name in NAMES}

    assert len({each.past for each in found.values()}) == 1
    for each in found.values():
        assert 0 < each.hits < each.past
        assert each.recomputed_tokens == 32 * (each.past - each.hits)
        assert each.recompute_s > 0.005 * (each.past - each.hits)
    assert TierSimulation("spillway", SMALL, 1).run() == found["spillway"]


def test_dropping_single_pages_beats_dropping_conversations() -> None:
    """The size of what is dropped is what the paper's gain over LRU comes from."""
    pensieve = TierSimulation("pensieve", SMALL, 2).run()
    conversations = TierSimulation("lru-conversation", SMALL, 2).run()

    assert pensieve.hit_rate > conversations.hit_rate + 0.02
    assert pensieve.recompute_s < conversations.recompute_s


def test_a_roomy_host_loses_nothing() -> None:
    """With room for everything no policy makes anything be computed again."""
    roomy = TierSetting(rate=4.0, host_pages=1 << 20, conversations=100)
    for name in NAMES:
        assert TierSimulation(name, roomy, 3).run().recomputed_tokens == 0


@pytest.mark.parametrize("skew", [0.9, math.inf])
def test_the_default_is_not_below_lru_on_generated_loads(skew: float) -> None:
    """By the rule of one tier, on a load with documents and on one without."""
    requests = kv_traces.generate(800, skew, 5)
    for size in (500, 2000):
        assert kv_rule.hit_rate("spillway", requests, size) >= kv_rule.hit_rate(
            "lru", requests, size
        )


def test_loads_are_repeatable_and_in_order() -> None:
    """A seed gives one load, sorted by time, whose ids name all before them."""
    loads = kv_loads.unseen(300, 4)

    assert loads == kv_loads.unseen(300, 4)
    others = kv_loads.unseen(300, 5)
    for kind, load in loads.items():
        assert load != others[kind]
        assert len(load) == 300
        assert [each.at_s for each in load] == sorted(each.at_s for each in load)
        before: dict[bytes, bytes] = {}
        for each in load:
            chain = [*each.pages, *each.answer]
            for parent, page in zip([b"", *chain], chain, strict=False):
                assert before.setdefault(page, parent) == parent


def test_traces_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    """Blocks keep their identity, answers get names of their own; a line that is none is told by its number."""
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 1500, "input_length": 900, "output_length": 70, "hash_ids": [7, 8]}'
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    one, two = kv_traces.read(path)

    assert (one.at_s, one.pages) == (1.5, two.pages)
    assert len(one.answer) == 2
    assert not set(one.answer) & set(two.answer)
    path.write_text(f"{line}\n[]\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2: .*expected a JSON object with"):
        kv_traces.read(path)


def test_the_row_judges_what_it_has(tmp_path: Path) -> None:
    """Without the trace the row measures the rest, says where the trace belongs, and goes on with what it kept."""
    partial = tmp_path / "P5.partial"
    options = BenchOptions(quick=True, setup_dir=tmp_path, partial=partial, only="agents")
    body = p5.run(options)
    kept = PartialResults(options, p5.RatesKept).kept

    assert any("put the published" in note for note in body.notes)
    assert set(kept.loads["agents"].sizes) == {500, 1000}
    assert {key.partition(":")[0].partition(",")[0] for key in body.met} == {"agents", "a decision"}
    assert p5.run(options).samples["loads"] == body.samples["loads"]


def test_the_way_from_lru_is_judged_by_load() -> None:
    """Half of the way is the goal, none the must; below LRU or S3-FIFO is said; where is no way none is judged."""
    rates = {"lru": 0.2, "s3fifo": 0.25, "informed": 0.4, "clairvoyant": 0.5}
    short, far = rates | {"spillway": 0.24}, rates | {"spillway": 0.3}
    none = rates | {"informed": 0.2, "spillway": 0.19}
    kept = p5.RatesKept(
        {"a": p5.LoadRates({1000: short, 5000: far}), p5.MOONCAKE: p5.LoadRates({1000: none})}
    )

    assert p5.describe(kept).met == {
        "a, 1,000: way from LRU": "must",
        "a, 5,000: way from LRU": "goal",
        "a: never below LRU": "goal",
        "a: never below S3-FIFO at 1k to 5k": "must",
    }
    assert p5.way(none) is None
    below = p5.RatesKept({"b": p5.LoadRates({50_000: none})})
    assert p5.describe(below).met["b: never below LRU"] == "missed"
