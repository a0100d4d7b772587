"""Patience: how long a sequence waits for pages on their way, and how small its steps are meanwhile. No I/O.

A step of the full token budget computes for as long as many fetches take, and nothing can end it. So computing beside a
fetch begins with small steps, also when a fetch was late or stood still for a moment.
"""

from __future__ import annotations

from typing import NamedTuple

from common.pages.identity import PAGE

# How long a sequence may wait to learn which pages the tiers have, and for a fetch that will be over by then: shares of
# the seconds that computing the pages takes. A hundredth more goes to small steps, so that all of it is a tenth.
ASK, HOLD = 0.03, 0.09
CAP = 4  # pages computed in a step while others are on their way
# Fewer pages are computed in one step, of which a step more would cost a large share.
LEAST = 4 * CAP
MARGIN = 1.5  # times the predicted seconds of a look-up, or of a fetch
STALL_S = 0.01  # a pause such as every process has now and then on a busy machine


class Wait(NamedTuple):
    """Until when a sequence is held (0.0: not at all), and until when its steps have at most `rows` rows."""

    hold_until_s: float
    slow_until_s: float
    rows: int


def for_look_up(now_s: float, asking_s: float, compute_s: float, pages: int) -> Wait:
    """Return the wait for a look-up, expected to take `asking_s`, of `pages` pages that take `compute_s` to compute."""
    # No pause is waited for that costs more than half of ASK: most look-ups are over long before.
    hold_s = min(ASK * compute_s, max(MARGIN * asking_s, min(STALL_S, ASK / 2 * compute_s)))
    held = now_s + hold_s if asking_s <= ASK * compute_s else 0.0
    slow = now_s + HOLD * compute_s if pages >= LEAST else 0.0
    return Wait(held, slow, PAGE * CAP)


def for_fetch(now_s: float, began_s: float, takes_s: float, compute_s: float, pages: int) -> Wait:
    """Return the wait for the rest of a fetch, which arrives in `takes_s`; all its `pages` take `compute_s` to compute.

    The sequence is held if they arrive before HOLD of `compute_s` has passed since `began_s`, and then not for
    longer. With `takes_s` 0 nothing is known of the tier.
    """
    if not takes_s:
        return for_look_up(now_s, ASK * compute_s, compute_s, pages)
    limit_s, due_s = began_s + HOLD * compute_s, now_s + MARGIN * takes_s
    held = min(limit_s, max(due_s, now_s + STALL_S)) if due_s <= limit_s else 0.0
    slow = held + MARGIN * takes_s if pages >= LEAST else 0.0
    if not held:
        slow = due_s if takes_s <= compute_s / 2 else 0.0
    return Wait(held, slow, PAGE * CAP)
