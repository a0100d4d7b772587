"""Explanation of a shard's searches: its kind of index, each effort's recall and time, and the path of a filter."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from services.vector_search.index.followed_plan import PlanState
from services.vector_search.index.index import Index
from services.vector_search.index.port import EffortPlan, IndexStats
from services.vector_search.index.rows import Flags
from services.vector_search.search_cost import SearchCost


def explain(index: Index, cost: SearchCost, k: int, wanted: Flags | None = None) -> dict[str, Any]:
    """Return the explanation of a search of one query for `k` hits; `wanted` marks the documents that a filter allows.

    `predicted_ms` is the longest that a search is predicted to take; None before any search was measured.
    """
    now, stats = index.now, index.now.stats()
    choice = index.choice()
    rungs, plans = now.ladder(), now.plans(1, k, wanted)
    # An index that is still being built has one plan for all of its efforts.
    pairs = zip(rungs, plans if len(plans) == len(rungs) else plans * len(rungs), strict=True)
    efforts = [
        {
            "effort": rung.effort,
            "recall": None if rung.recall is None else round(rung.recall, 4),
            "path": plan.path,
            "predicted_ms": _ms(cost.at_most_s(plan)),
        }
        for rung, plan in pairs
    ]
    told: dict[str, Any] = {
        "kind": now.kind,
        "why": choice.why + _building(index, stats),
        "live": stats.live,
        "newer": stats.newer,
        "deleted_ratio": round(stats.deleted_ratio, 4),
        "path": stats.path,
        "effort": stats.effort,
        "recall": round(stats.recall, 4),
        "recall_goal": index.followed.goal,
        "bytes": stats.bytes,
        "plan": _plan(index.followed.now),
        "efforts": efforts,
    }
    if stats.quantizer:
        told["quantizer"] = stats.quantizer
    if stats.coding is not None:
        told["coding"] = stats.coding._asdict()
    if wanted is not None:
        own = [at for at, rung in enumerate(rungs) if rung.effort == stats.effort]
        plan = plans[own[0]] if own and len(plans) == len(rungs) else plans[0]
        told["filter"] = _filtered(now.matching(wanted), stats, plan, cost)
    return told


def _plan(state: PlanState) -> dict[str, Any] | None:
    """Return the tuning's plan in force, with the recall measured as `proved`; None without one."""
    if state.plan is None:
        return None
    told: dict[str, Any] = msgspec.to_builtins(state.plan)
    measured = state.measured
    told["proved"] = None if measured is None else round(measured.recall, 4)
    return told


def _building(index: Index, stats: IndexStats) -> str:
    """Return sentences about an index still being built, a plan given up, and a failed training; "" for none."""
    now = index.now
    told = ""
    if now.kind != "exact" and stats.path == "exact":
        told = "; it is being built, and every row is compared until then"
    followed = index.followed.now
    if followed.refused:
        told += f"; the plan of tuning {followed.refused} was given up: {followed.why}"
    if index.problem:
        told += f"; the last training of lists failed: {index.problem}"
    return told


def _filtered(
    matching: int, stats: IndexStats, plan: EffortPlan, cost: SearchCost
) -> dict[str, Any]:
    if plan.path == "filtered-exact":
        why = f"comparing the {matching:,} rows that match takes less than looking further to find enough of them"
        if stats.path == "exact":
            why = f"the {matching:,} rows that match are compared one by one"
    elif plan.path == "filtered-ivfpq":
        why = f"{matching:,} rows match: reading more lists finds enough of them sooner than comparing all"
    else:
        why = f"{matching:,} rows match: walking the graph far enough finds enough of them sooner than comparing all"
    return {
        "matching": matching,
        "selectivity": round(matching / stats.live, 6) if stats.live else 0.0,
        "path": plan.path,
        "effort": plan.effort,
        "predicted_ms": _ms(cost.at_most_s(plan)),
        "why": why,
    }


def _ms(seconds: float) -> float | None:
    return round(1000 * seconds, 3) if math.isfinite(seconds) else None
