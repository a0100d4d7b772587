"""The plan of a tuning that an index keeps to: how it is built by it, and verified before it takes over."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from common.wire.tuning import IndexPlan, MeasuredPlan
from services.vector_search.index import search_path
from services.vector_search.index.rows import Flags, Ints

# A plan is kept to while there are so many times the rows that it was made for, or such a share of them.
_GROWN, _SHRUNK = 4.0, 0.25
# By the highest bit of a label times this, rows are queries of tuning, or of the proof of what it chose.
_MIXED = np.uint64(0x9E3779B97F4A7C15)


class PlanState(msgspec.Struct, frozen=True):
    """The plan in use and what an index built by it was measured to do (None: it is not built); the plan before it.

    `refused` is the tuning whose plan could not be built, and `why`.
    """

    plan: IndexPlan | None = None
    measured: MeasuredPlan | None = None
    before: IndexPlan | None = None
    before_measured: MeasuredPlan | None = None
    refused: str = ""
    why: str = ""


class HeldOut(NamedTuple):
    """Rows held out of a build: those by which the effort is chosen, and those that only the proof asks for."""

    tuning: Ints
    proof: Ints


class FollowedPlan:
    """Which plan an index keeps to; another thread may change it, the one that maintains builds by it."""

    def __init__(self) -> None:
        self.now = PlanState()

    def follow(self, plan: IndexPlan | None) -> bool:
        """Keep to another plan from now on, or to none; True if it is another one."""
        now = self.now
        if plan == now.plan or (plan is not None and plan.tuning == now.refused):
            return False
        if plan == now.before:
            self.now = PlanState(plan, now.before_measured)
        else:
            self.now = PlanState(plan, None, now.plan, now.measured)
        return True

    @property
    def goal(self) -> float:
        """The share of true neighbours that searches are to find."""
        plan = self.now.plan
        return plan.recall if plan is not None else search_path.RECALL_GOAL

    def threads(self, most: int) -> int:
        """Return how many of the threads a batch of searches is divided among."""
        now = self.now
        if now.plan is None or now.measured is None:
            return most
        return min(now.plan.setting.threads, most)

    def held(self, kind: str, live: int) -> IndexPlan | None:
        """Return the plan if it is of a kind and the rows are still about as many as it was made for."""
        plan = self.now.plan
        if plan is None or plan.setting.kind != kind or not holds(plan, live):
            return None
        return plan

    def due(self, kind: str, live: int) -> IndexPlan | None:
        """Return the plan if it holds for a kind and no index was built by it yet."""
        return self.held(kind, live) if self.now.measured is None else None

    def built(self, plan: IndexPlan, measured: MeasuredPlan) -> None:
        """Note that an index built by a plan is in use."""
        now = self.now
        if now.plan == plan:
            self.now = PlanState(plan, measured)

    def dropped(self, plan: IndexPlan | None) -> bool:
        """Return whether another plan is kept to by now, so that what was built by this one is not to be used."""
        return plan is not None and self.now.plan != plan

    def refuse(self, plan: IndexPlan, why: str) -> None:
        """Go back to the plan before: the index in use stays."""
        now = self.now
        if now.plan == plan:
            self.now = PlanState(now.before, now.before_measured, refused=plan.tuning, why=why)


def holds(plan: IndexPlan, live: int) -> bool:
    """Return whether a plan still holds for so many rows."""
    return _SHRUNK * plan.rows <= live <= _GROWN * plan.rows


def tunes(labels: Ints) -> Flags:
    """Return which rows may be queries of tuning, about half; the others are asked for by proofs alone."""
    with np.errstate(over="ignore"):
        mixed = labels.astype(np.uint64) * _MIXED
    first: Flags = mixed >> np.uint64(63) == 0
    return first


def divided(labels: Ints, rows: Ints) -> HeldOut:
    """Divide rows that are held out."""
    tuning = tunes(labels[rows])
    return HeldOut(rows[tuning], rows[~tuning])


def proof(recall: float, queries: int) -> MeasuredPlan:
    """Return a recall with its standard error: at most that of queries that find all neighbours or none."""
    error = (recall * (1.0 - recall) / max(queries, 1)) ** 0.5
    return MeasuredPlan(recall=recall, error=error, queries=queries)


def falls_short(plan: IndexPlan, measured: MeasuredPlan) -> str:
    """Return why an index falls short of its plan, its recall being less by more than chance; "" if it does not."""
    if measured.recall + search_path.SURE * measured.error >= plan.recall:
        return ""
    return (
        f"an index of kind {plan.setting.kind} found {measured.recall:.1%} of the true neighbours of "
        f"{measured.queries} queries that tuning had not seen; the goal is {plan.recall:.1%}"
    )
