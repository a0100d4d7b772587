"""The choice of an index's kind: a pure function of what is known of a shard, with its reason in a sentence."""

from __future__ import annotations

from typing import NamedTuple

from services.vector_search.index.port import Kind

# A graph stays until the rows have shrunk to this share of what it is built for, so that it is not built twice.
_SHRUNK = 0.8


class IndexFacts(NamedTuple):
    """What the choice of a kind depends on. `room_bytes` is memory that a structure may still take, None if unknown.

    `graph_bytes` is what a graph over the live rows takes beside them. `recall_goal` is the share of true neighbours
    that a search must find.
    """

    live: int
    dimension: int
    exact_below: int
    recall_goal: float
    graph_bytes: int
    room_bytes: int | None = None
    now: Kind = "exact"


class KindChoice(NamedTuple):
    """The kind to use, and why."""

    kind: Kind
    why: str


def choose_kind(facts: IndexFacts) -> KindChoice:
    """Return the kind that fits a shard: the one that answers soonest at the recall goal and whose memory there is."""
    rows = f"{facts.live:,} live vectors of {facts.dimension:,} dimensions"
    if facts.recall_goal >= 1.0:
        return KindChoice("exact", f"{rows}: only comparing every one finds all true neighbours")
    limit = max(facts.exact_below, 1)
    if facts.live < (limit if facts.now == "exact" else max(_SHRUNK * limit, 1)):
        why = f"{rows}, fewer than {limit:,}: comparing every one is quick and always right"
        return KindChoice("exact", why)
    if facts.now == "exact" and facts.room_bytes is not None:
        short = facts.graph_bytes - facts.room_bytes
        if short > 0:
            return KindChoice(
                "exact",
                f"{rows}: a graph needs {_size(facts.graph_bytes)} beside them, and the process has "
                f"{_size(max(facts.room_bytes, 0))} left",
            )
    many = "at least" if facts.live >= limit else "not far below"
    return KindChoice(
        "graph",
        f"{rows}, {many} {limit:,}: a graph finds {facts.recall_goal:.0%} of the true neighbours "
        "and looks at few of the rows",
    )


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,} bytes"
