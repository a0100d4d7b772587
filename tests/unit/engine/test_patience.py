"""How long a sequence waits for pages: never longer than a share of computing them, and never with large steps."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.never_slower import TierSpeed, compare
from common.pages.identity import PAGE
from engine.decoder.kv import patience

SECONDS = st.floats(1e-6, 100.0)


@given(
    now_s=st.floats(0.0, 1e6),
    waited_s=SECONDS,
    takes_s=SECONDS,
    compute_s=SECONDS,
    pages=st.integers(1, 500),
)
def test_the_wait_for_a_fetch_is_bounded(
    now_s: float, waited_s: float, takes_s: float, compute_s: float, pages: int
) -> None:
    """A sequence is held while its pages are expected within HOLD of computing them; steps are small beside a fetch."""
    began_s = now_s - waited_s
    wait = patience.for_fetch(now_s, began_s, takes_s, compute_s, pages)
    limit_s = began_s + patience.HOLD * compute_s
    assert bool(wait.hold_until_s) == (now_s + patience.MARGIN * takes_s <= limit_s)
    assert wait.hold_until_s <= max(limit_s, 0.0)
    assert wait.slow_until_s > wait.hold_until_s or takes_s > compute_s / 2
    assert PAGE <= wait.rows <= PAGE * patience.CAP


@given(now_s=st.floats(0.0, 1e6), asking_s=SECONDS, compute_s=SECONDS, pages=st.integers(1, 500))
def test_the_wait_for_a_look_up_is_bounded(
    now_s: float, asking_s: float, compute_s: float, pages: int
) -> None:
    """A look-up is waited for if it is expected within ASK of computing the pages, and no longer than that."""
    wait = patience.for_look_up(now_s, asking_s, compute_s, pages)
    assert bool(wait.hold_until_s) == (asking_s <= patience.ASK * compute_s)
    assert wait.hold_until_s <= now_s + patience.ASK * compute_s
    assert wait.slow_until_s >= wait.hold_until_s or pages < patience.LEAST


def test_a_fetch_that_is_late_costs_no_large_step() -> None:
    """A tier that takes twice as long as usual is waited for, and computing beside it begins with small steps."""
    usual, late = TierSpeed(page_s=0.0005), TierSpeed(page_s=0.001)
    found = compare([usual, usual, usual, usual, late], 1.0, 2055, seed=1, turns=20)
    first_s = [ours for ours, _, _ in found]
    assert max(first_s[1:]) <= 3 * median(first_s[1:])
