"""What row Q2 says of reranking: how the follow-ups are asked, the fusion of two orders, and a model nobody trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spillway_client import Hit

from bench.workloads import trained_ranker
from bench.workloads.follow_ups import follow_ups
from bench.workloads.rerankings import fused, ways

HITS = [Hit(f"page{n}", 1.0 - n / 10) for n in range(4)]


def test_fused_orders_are_sums_of_reciprocal_ranks() -> None:
    """By hand: the ranks 1 2 3 4 and 4 2 1 3 give 1/61 + 1/64, 2/62, 1/63 + 1/61, 1/64 + 1/63."""
    found = fused(HITS, [0.1, 0.8, 0.9, 0.2])

    assert [hit.id for hit in found] == ["page2", "page1", "page0", "page3"]


@given(st.lists(st.floats(-9, 9), min_size=4, max_size=4))
def test_a_fusion_keeps_all_hits_and_an_agreed_order(scores: list[float]) -> None:
    """Every hit is there once; where the cross-encoder agrees with the search, the order stays."""
    assert sorted(hit.id for hit in fused(HITS, scores)) == [hit.id for hit in HITS]
    assert fused(HITS, sorted(scores, reverse=True)) == HITS
    assert fused([], []) == []


def test_the_follow_ups_are_asked_in_three_ways() -> None:
    """By the rule with its option, by hand without a conversation; the last query is what the product reranks by."""
    given = follow_ups()
    asked = ways(given)
    plain, rule, hand = (
        asked[name] for name in ("no rewriting", "`rewrite`, the rule", "written by hand")
    )

    assert len(plain) == len(rule) == len(hand) == len(given) == 70
    assert all(each.options == {"rewrite": {"by": "rule"}} for each in rule)
    assert all(each.queries[-1].startswith(each.one.ask) for each in rule)
    assert all(each.one.messages == [{"role": "user", "content": each.one.alone}] for each in hand)
    assert all(each.queries == [each.one.alone] for each in hand)


def test_the_cross_encoder_is_that_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory without a model counts as none."""
    monkeypatch.setenv(trained_ranker.VARIABLE, str(tmp_path))
    assert trained_ranker.readable() is None
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert trained_ranker.readable() == tmp_path
