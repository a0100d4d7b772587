"""The choice of an index's kind: a pure function of what is known of a shard, with its reason in a sentence."""

from __future__ import annotations

from typing import NamedTuple

from common.wire.tuning import IndexPlan
from services.vector_search.index.followed_plan import holds
from services.vector_search.index.port import Kind

# A graph stays until the rows have shrunk to this share of what it is built for, so that it is not built twice.
_SHRUNK = 0.8
# A structure is built anew beside itself, so it takes its memory twice; a graph leaves as much once more for the
# training of lists that take its place. What is not there yet has some to spare.
_TIMES: dict[Kind, float] = {"graph": 3.0, "ivfpq": 2.0}
_SPARE = 1.25


class IndexFacts(NamedTuple):
    """What the choice of a kind depends on.

    `graph_bytes` and `lists_bytes` are what a graph, or codes in lists, over the live rows take beside them;
    `room_bytes` is memory that either may take, what the one in use takes among it, None if unknown. `recall_goal` is
    the share of true neighbours that a search must find, `plan` what a tuning chose.
    """

    live: int
    dimension: int
    exact_below: int
    recall_goal: float
    graph_bytes: int
    lists_bytes: int
    room_bytes: int | None = None
    now: Kind = "exact"
    plan: IndexPlan | None = None


class KindChoice(NamedTuple):
    """The kind to use, and why."""

    kind: Kind
    why: str


def choose_kind(facts: IndexFacts) -> KindChoice:
    """Return the kind that fits a shard: the one that answers soonest at the recall goal and whose memory there is."""
    rows = f"{facts.live:,} live vectors of {facts.dimension:,} dimensions"
    if facts.plan is not None:
        planned = _planned(facts, facts.plan, rows)
        if planned.why:
            return planned
    if facts.recall_goal >= 1.0:
        return KindChoice("exact", f"{rows}: only comparing every one finds all true neighbours")
    limit = max(facts.exact_below, 1)
    if facts.live < (limit if facts.now == "exact" else max(_SHRUNK * limit, 1)):
        why = f"{rows}, fewer than {limit:,}: comparing every one is quick and always right"
        return KindChoice("exact", why)
    if not _fits(facts.graph_bytes, facts, "graph"):
        why = (
            f"{rows}: a graph needs {_size(facts.graph_bytes)} beside them and twice as much to be built anew or "
            f"replaced, codes in lists {_size(facts.lists_bytes)} twice, and the process has "
            f"{_size(max(facts.room_bytes or 0, 0))} for either"
        )
        if facts.now == "ivfpq" or _fits(facts.lists_bytes, facts, "ivfpq"):
            return KindChoice("ivfpq", why)
        if facts.now == "exact":
            return KindChoice("exact", why)
    many = "at least" if facts.live >= limit else "not far below"
    return KindChoice(
        "graph",
        f"{rows}, {many} {limit:,}: a graph finds {facts.recall_goal:.0%} of the true neighbours "
        "and looks at few of the rows",
    )


def _planned(facts: IndexFacts, plan: IndexPlan, rows: str) -> KindChoice:
    """Return the kind of a plan; without a reason if the rows have outgrown the plan, or memory is short."""
    kind = plan.setting.kind
    size = {"exact": 0, "graph": facts.graph_bytes, "ivfpq": facts.lists_bytes}[kind]
    if not holds(plan, facts.live) or (kind != "exact" and not _fits(size, facts, kind)):
        return KindChoice(kind, "")
    told = {"exact": "comparing every one", "graph": f"a graph of {plan.setting.links} links"}
    way = told.get(kind, f"codes in {plan.setting.lists:,} lists")
    return KindChoice(
        kind, f"{rows}: tuning {plan.tuning} chose {way} for a recall of {plan.recall:g}"
    )


def _fits(size: int, facts: IndexFacts, kind: Kind) -> bool:
    """Return whether there is memory for a structure of a kind."""
    if facts.room_bytes is None:
        return True
    return size * _TIMES[kind] * (1.0 if facts.now == kind else _SPARE) <= facts.room_bytes


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,} bytes"
