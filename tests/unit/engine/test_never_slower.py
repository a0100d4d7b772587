"""A tier of any speed, hung or dead, never makes a turn much slower than computing it; a fast one makes it faster."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.never_slower import TierSpeed, compare
from engine.decoder.kv.tier_breaker import MISSES, PAUSE_S, PROBE, TierBreaker

SPEEDS = st.builds(
    TierSpeed,
    latency_s=st.sampled_from([0.0001, 0.001, 0.01, 0.3]),
    page_s=st.sampled_from([0.0001, 0.001, 0.01, 0.03, 0.1, 1.0]),
    answers=st.sampled_from([math.inf, math.inf, math.inf, 0, 1, 7, 20]),
    dead=st.sampled_from([False, False, False, True]),
)


@given(
    speeds=st.lists(SPEEDS, min_size=1, max_size=4),
    hits=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    tokens=st.integers(65, 3000),
    seed=st.integers(0, 1000),
)
def test_never_slower(speeds: list[TierSpeed], hits: float, tokens: int, seed: int) -> None:
    """P3 on the virtual clock, whatever the tier does, and however it changes from turn to turn."""
    found = compare(speeds, hits, tokens, seed=seed, turns=10)
    ratios = [ours / theirs for ours, theirs, _ in found]
    assert max(ratios) <= 1.10 + 1e-9
    assert len(speeds) > 1 or median(ratios) <= 1.03 + 1e-9


@pytest.mark.parametrize(("page_s", "most"), [(0.0005, 0.05), (0.01, 0.3), (0.04, 0.55)])
def test_faster(page_s: float, most: float) -> None:
    """With all pages there, computing and fetching meet where both end together."""
    found = compare([TierSpeed(page_s=page_s)], 1.0, 2055, seed=1, turns=10)
    assert median(ours / theirs for ours, theirs, _ in found) < most
    assert all(fetched for _, _, fetched in found)


def test_trust() -> None:
    """After three misses in a row a tier is left alone for a while, then asked for little."""
    trust, prices = TierBreaker(), [1e9] * 50
    assert trust.asks(prices, 0.0) == PROBE
    trust.came(2, 0.02, 0.0)
    assert trust.asks(prices, 0.0) == 50
    for miss in range(MISSES):
        assert trust.asks(prices, 1.0) == 50, miss
        trust.came(2, 40.0 * 4**miss, 1.0)
    assert trust.asks(prices, 1.0 + PAUSE_S / 2) == 0
    assert trust.asks(prices, 1.0 + PAUSE_S) == PROBE
    trust.failed(7.0)
    assert trust.asks(prices, 7.1) == 0


def test_a_slow_tier_is_asked_again_after_a_while() -> None:
    """Pages dearer than computing them are not asked for, but a few now and then: the tier may have become faster."""
    trust = TierBreaker()
    trust.came(2, 2.0, 0.0)
    assert trust.asks([0.5] * 9, 0.1) == 0
    assert trust.asks([0.5] * 5 + [2.0] * 4, 0.1) == 4
    assert trust.asks([0.5] * 9, 0.1 + PAUSE_S) == PROBE
