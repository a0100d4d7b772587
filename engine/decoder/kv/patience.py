"""Patience: the time that a sequence waits for pages on their way, and the size of its steps meanwhile. No I/O.

A step of the full token budget takes as long as many fetches and cannot be interrupted. So computing beside a fetch
begins with small steps, also after a late or stalled fetch.
"""

from __future__ import annotations

from typing import NamedTuple

from common.pages.identity import PAGE

# The longest wait of a sequence for a look-up of the tiers' pages, and for a fetch that is predicted to end in time: as
# shares of the seconds to compute the pages. Small steps cost a hundredth more, so that the sum is a tenth.
ASK, HOLD = 0.03, 0.09
CAP = 4  # pages computed in a step while others are on their way
# Fewer pages are computed in one step: the cost of a further step would be a large share.
LEAST = 4 * CAP
MARGIN = 1.5  # factor on the predicted seconds of a look-up or a fetch
STALL_S = 0.01  # an occasional pause of a process on a busy machine


class Wait(NamedTuple):
    """A wait: until when a sequence is held (0.0: not held), and until when its steps have at most `rows` rows."""

    hold_until_s: float
    slow_until_s: float
    rows: int


def for_look_up(now_s: float, asking_s: float, compute_s: float, pages: int) -> Wait:
    """Return the wait for a look-up, expected to take `asking_s`, of `pages` pages worth `compute_s` of computing."""
    # The allowance for a pause is at most half of ASK, since most look-ups end much earlier.
    hold_s = min(ASK * compute_s, max(MARGIN * asking_s, min(STALL_S, ASK / 2 * compute_s)))
    held = now_s + hold_s if asking_s <= ASK * compute_s else 0.0
    slow = now_s + HOLD * compute_s if pages >= LEAST else 0.0
    return Wait(held, slow, PAGE * CAP)


def for_fetch(now_s: float, began_s: float, takes_s: float, compute_s: float, pages: int) -> Wait:
    """Return the wait for the rest of a fetch, predicted to take `takes_s`, of `pages` worth `compute_s` of computing.

    The sequence is held if the rest is predicted to arrive within HOLD of `compute_s` after `began_s`, and never longer
    than that. `takes_s` 0 means that the tier's speed is unknown.
    """
    if not takes_s:
        return for_look_up(now_s, ASK * compute_s, compute_s, pages)
    limit_s, due_s = began_s + HOLD * compute_s, now_s + MARGIN * takes_s
    held = min(limit_s, max(due_s, now_s + STALL_S)) if due_s <= limit_s else 0.0
    slow = held + MARGIN * takes_s if pages >= LEAST else 0.0
    if not held:
        slow = due_s if takes_s <= compute_s / 2 else 0.0
    return Wait(held, slow, PAGE * CAP)
