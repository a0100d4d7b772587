"""The first measurements of what a shard's searches cost, taken in the background before any search has told."""

from __future__ import annotations

import numpy as np

from common.clock import Clock
from services.vector_search.index.index import Index
from services.vector_search.index.port import Effort, Kind, SearchPlan
from services.vector_search.index.rows import Flags, Floats, prepare
from services.vector_search.search_cost import SearchCost

_K = 10
_BATCHES = (1, 16)
# Filters let through these shares of the documents: one of them leaves few rows, the other many.
_SHARES = (0.01, 0.5)
# A search that takes longer is not repeated, nor tried with more queries.
_LONG_S = 0.1
# So much may a shard grow or shrink before it is measured again.
_GROWTH = 2.0


class Calibration:
    """Probes an index whenever it has changed its kind or doubled; one thread calls `keep`."""

    def __init__(self, cost: SearchCost, clock: Clock) -> None:
        self._cost, self._clock = cost, clock
        self._kind: Kind | None = None
        self._live = 0

    def keep(self, index: Index, documents: int) -> None:
        """Measure the index if it is not the one that was measured; `documents` are the numbers a filter marks."""
        live, kind = index.rows.live_count, index.now.kind
        known = self._live / _GROWTH < live < self._live * _GROWTH
        if not live or (kind == self._kind and known):
            return
        self._kind, self._live = kind, live
        rng = np.random.default_rng(live)
        wanted = [rng.random(max(documents, 1)) < share for share in _SHARES]
        vectors = rng.standard_normal((max(_BATCHES), index.rows.dimension)).astype(np.float32)
        queries = prepare(vectors, index.metric)
        probes: list[tuple[SearchPlan, float]] = []
        efforts = [rung.effort for rung in index.now.ladder()]
        for effort in {efforts[0]: 0, efforts[len(efforts) // 2]: 0, efforts[-1]: 0, "exact": 0}:
            probes += self._probe(index, queries, effort, None)
        for mask in wanted:
            probes += self._probe(index, queries, None, mask)
        self._cost.calibrate(probes)

    def _probe(
        self, index: Index, queries: Floats, effort: Effort | None, wanted: Flags | None
    ) -> list[tuple[SearchPlan, float]]:
        """Return plans and the seconds they took, the better of two times each, unless that takes long."""
        measured: list[tuple[SearchPlan, float]] = []
        for count in _BATCHES:
            times: list[float] = []
            while len(times) < 2 and sum(times) < _LONG_S:
                began_s = self._clock.perf_s()
                found = index.now.search(
                    queries[:count], _K, effort=effort, wanted=wanted, remember=False
                )
                times.append(max(self._clock.perf_s() - began_s, 1e-9))
            if found.path == found.plan.path:
                measured.append((found.plan, min(times)))
            if min(times) >= _LONG_S:
                break
        return measured
