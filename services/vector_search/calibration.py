"""The first measurements of the cost of a shard's searches, taken in the background before any search ran."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.vector_search.index.index import Index
from services.vector_search.index.port import Effort, EffortPlan, Kind, Neighbours
from services.vector_search.index.rows import Flags, Floats, prepare
from services.vector_search.search_cost import SearchCost

TimedSearch = Callable[[Floats, Effort | None, Flags | None], tuple[Neighbours, float]]

_BATCHES = (1, 16)
# Filters let through these shares of the documents: one of them leaves few rows, the other many.
_SHARES = (0.01, 0.5)
# A search that takes longer is not repeated, nor tried with more queries.
_LONG_S = 0.1
# A shard that grew or shrank by this factor is measured again.
_GROWTH = 2.0


class Calibration:
    """Probes an index whenever the kind of the index has changed or its rows have doubled or halved.

    One thread calls `keep`. `search` runs one batch as a search of the shard does, and returns the seconds it took.
    """

    def __init__(self, cost: SearchCost, search: TimedSearch) -> None:
        self._cost, self._search = cost, search
        self._kind: Kind | None = None
        self._live = 0

    def keep(self, index: Index, documents: int) -> None:
        """Measure the index if its kind or size has changed; a mask of a filter has `documents` flags."""
        live, kind = index.rows.live_count, index.now.kind
        known = self._live / _GROWTH < live < self._live * _GROWTH
        if not live or (kind == self._kind and known):
            return
        self._kind, self._live = kind, live
        rng = np.random.default_rng(live)
        wanted = [rng.random(max(documents, 1)) < share for share in _SHARES]
        vectors = rng.standard_normal((max(_BATCHES), index.rows.dimension)).astype(np.float32)
        queries = prepare(vectors, index.metric)
        probes: list[tuple[EffortPlan, float]] = []
        efforts = [rung.effort for rung in index.now.ladder()]
        for effort in {efforts[0]: 0, efforts[len(efforts) // 2]: 0, efforts[-1]: 0, "exact": 0}:
            probes += self._probe(queries, effort, None)
        for mask in wanted:
            probes += self._probe(queries, None, mask)
        self._cost.calibrate(probes)

    def _probe(
        self, queries: Floats, effort: Effort | None, wanted: Flags | None
    ) -> list[tuple[EffortPlan, float]]:
        """Return plans and their seconds: the better of two times, one time for a search that takes _LONG_S or more."""
        measured: list[tuple[EffortPlan, float]] = []
        for count in _BATCHES:
            times: list[float] = []
            while len(times) < 2 and sum(times) < _LONG_S:
                found, seconds = self._search(queries[:count], effort, wanted)
                times.append(max(seconds, 1e-9))
            if found.path == found.plan.path:
                measured.append((found.plan, min(times)))
            if min(times) >= _LONG_S:
                break
        return measured
