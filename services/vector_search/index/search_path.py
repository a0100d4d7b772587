"""The path of a search, chosen by counts alone.

Seconds per unit are those of one core at 384 dimensions; only their ratio matters.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

# Gathering one row and comparing it, comparing a gathered row with one more query, keeping one candidate in the graph.
GATHERED_ROW_S = 1.5e-7
COMPARED_ROW_S = 7e-9
CANDIDATE_S = 1.8e-6
# A mask leaves this many times the results needed, on average, in the first fetch.
MARGIN = 2.0
GROWTH = 3
# With a filter so many times ef candidates are kept beyond the depth of the results: ef is what the first k need.
BEYOND = 1.5
EF_LADDER = (
    *(10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96),
    *(128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
)
RECALL_GOAL = 0.95
# Standard errors that what is measured must lie above the goal: once in fifty cases it then is luck.
SURE = 2.0
# ef is chosen anew before the graph has grown this much since, or this much when its last rows wait to go in.
RETUNE_GROWTH = 1.1
LAST_GROWTH = 1.02
# Queries by which ef is chosen, and how few will do.
AUDITED = 256
LEAST_AUDITED = 64

# Links of a node above the lowest level, where it has nearly twice as many, and from which ef on many are quicker.
FEW_LINKS, MANY_LINKS = 16, 32
MANY_FROM_EF = 56

Way = Literal["exact", "graph", "filtered-exact", "filtered-graph"]


class SearchPath(NamedTuple):
    """A way to search; `fetch` is how many the graph is asked for at first, `limit` from when a scan is cheaper.

    `beam` is how many candidates the graph keeps meanwhile.
    """

    way: Way
    fetch: int
    limit: int
    beam: int


def links(now: int, ef: int) -> int:
    """Return how many links a node should have: many where rows are hard to tell apart, which ef shows.

    A graph that has many keeps them: its ef is less because of them.
    """
    return MANY_LINKS if now >= MANY_LINKS or ef >= MANY_FROM_EF else FEW_LINKS


def room(*, indexed: int, behind: int, tuned_at: int) -> int:
    """Return how many of the rows behind may enter a graph before its ef is chosen anew; 0 when that is due.

    ef was chosen when the graph held `tuned_at` rows. Rows that wait are the queries it is chosen by, so the last
    of them stay out until it was.
    """
    most = max(int(RETUNE_GROWTH * tuned_at), tuned_at + LEAST_AUDITED) - indexed
    if behind >= AUDITED and indexed + behind - AUDITED > LAST_GROWTH * tuned_at:
        most = min(most, behind - AUDITED)
    return max(min(most, behind), 0)


def choose(
    *, live: int, indexed: int, matching: int | None, queries: int, k: int, ef: int, exact: bool
) -> SearchPath:
    """Choose from the live rows, those in the graph, and the rows a filter matches (None: no filter).

    The `queries` of a batch share a filter, so its rows are gathered once for all of them.
    """
    graph = indexed > 0 and not exact
    if matching is None:
        return SearchPath("graph", k, live, max(ef, k)) if graph else SearchPath("exact", 0, 0, 0)
    scan_s = matching * (COMPARED_ROW_S + (GATHERED_ROW_S - COMPARED_ROW_S) / max(queries, 1))
    # ef finds the first k; with a filter they are among the first `depth` rows, which takes as many candidates more.
    depth = math.ceil(k * live / max(matching, 1))
    fetch = math.ceil(MARGIN * k * live / max(matching, 1)) + k
    beam = max(fetch, depth + math.ceil(BEYOND * ef))
    limit = int(scan_s / CANDIDATE_S)
    if not graph or matching <= k or beam >= min(limit, indexed):
        return SearchPath("filtered-exact", 0, 0, 0)
    return SearchPath("filtered-graph", fetch, min(limit, indexed), beam)
