"""The linear cost model: fitted exactly, never negative, and a depth that keeps its deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost.linear import (
    LONG_TEXT_TOKENS,
    PARCEL_ITEMS,
    PARCEL_TOKENS,
    LinearCost,
    Probe,
    fit,
)

SHAPES = ((1, 8), (1, 64), (8, 256), (8, 1024), (32, 2048))
COSTS = st.builds(LinearCost, st.floats(1e-4, 0.1), st.floats(0, 1e-2), st.floats(1e-6, 1e-3))


@given(COSTS)
def test_fit_finds_the_line(cost: LinearCost) -> None:
    """Probes that lie on a line give its predictions back."""
    found = fit([Probe(items, tokens, cost.seconds(items, tokens)) for items, tokens in SHAPES])

    for items, tokens in (*SHAPES, (3, 77), (64, 4096)):
        assert found.seconds(items, tokens) == pytest.approx(
            cost.seconds(items, tokens), rel=1e-3, abs=1e-6
        )


@given(st.lists(st.floats(1e-4, 10), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_fit_is_never_negative(seconds: list[float]) -> None:
    """Whatever was measured, no coefficient is negative and some time is predicted."""
    found = fit([Probe(*shape, value) for shape, value in zip(SHAPES, seconds, strict=True)])

    assert min(found) >= 0
    assert found.seconds(8, 256) > 0


def test_fit_refuses_nonsense() -> None:
    """No probes, or a probe without time, is an error."""
    for probes in ([], [Probe(1, 1, 0.0)], [Probe(1, 1, float("nan"))]):
        with pytest.raises(ValueError, match="probe"):
            fit(probes)


@given(COSTS, st.floats(0.05, 10))
def test_depth_keeps_the_deadline(cost: LinearCost, slo_s: float) -> None:
    """Long texts up to the depth in tokens, in full batches, are done in time, or depth is one parcel."""
    batch_tokens = cost.batch_tokens()
    depth = cost.depth(slo_s, batch_items=256, batch_tokens=batch_tokens)
    items = depth.tokens / LONG_TEXT_TOKENS
    batches = depth.tokens / batch_tokens + 1

    assert depth.items >= PARCEL_ITEMS
    assert depth.tokens >= PARCEL_TOKENS
    if depth.tokens > PARCEL_TOKENS:
        work = cost.alpha_tokens_s * depth.tokens + cost.alpha_items_s * items
        assert work + batches * cost.beta_s <= slo_s * 1.001


def test_short_texts_fill_the_deadline() -> None:
    """Depth in items does not bind before depth in tokens for parcels of ordinary texts."""
    depth = LinearCost(0.002, 0.0, 8e-5).depth(2.0, batch_items=256, batch_tokens=2048)

    assert depth.items * LONG_TEXT_TOKENS > depth.tokens > 20_000


def test_free_device() -> None:
    """A device without marginal cost still has finite, whole depths."""
    depth = LinearCost(0.0, 0.0, 0.0).depth(2.0, batch_items=256, batch_tokens=8192)

    assert (type(depth.items), type(depth.tokens)) == (int, int)
    assert LinearCost(0.005, 0.0, 0.0).batch_tokens() == PARCEL_TOKENS
    assert LinearCost(0.005, 1e-3, 0.0).scaled(2.0) == LinearCost(0.01, 2e-3, 0.0)
