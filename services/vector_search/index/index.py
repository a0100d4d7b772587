"""The index of one shard: of the kind that fits it now, and of another once that fits better.

The kinds share the rows, so a change of kind loses no write: the new kind answers at once, exactly where it has no
structure yet, and builds that beside the searches.
"""

from __future__ import annotations

from collections.abc import Callable

from common.clock import SYSTEM, Clock
from services.vector_search.index import search_path
from services.vector_search.index.chooser import IndexFacts, KindChoice, choose_kind
from services.vector_search.index.exact_index import ExactIndex
from services.vector_search.index.graph_index import GraphIndex
from services.vector_search.index.memory import room_bytes
from services.vector_search.index.native_graph import SearchGraph, graph_bytes
from services.vector_search.index.port import Effort, Kind, Neighbours, VectorIndex
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows
from services.vector_search.index.state import IndexState, IndexView


class Index:
    """Vectors by label; `now` is the index in use. One thread calls `publish`, one `maintain`; any number search."""

    now: VectorIndex

    def __init__(
        self,
        dimension: int,
        metric: Metric,
        *,
        exact_below: int,
        threads: int,
        clock: Clock = SYSTEM,
        room: Callable[[], int | None] = room_bytes,
    ) -> None:
        self.metric: Metric = metric
        self._dimension, self._exact_below = dimension, exact_below
        self._threads, self._clock, self._room = threads, clock, room
        self._state = IndexState(dimension)
        self._closed = False
        self.now = self._of("exact")

    @property
    def rows(self) -> VectorRows:
        """The rows of the shard, deleted ones among them until they are dropped."""
        return self._state.view.rows

    def _of(self, kind: Kind) -> VectorIndex:
        if kind == "graph":
            return GraphIndex(self._state, self.metric, threads=self._threads, clock=self._clock)
        return ExactIndex(self._state, self.metric, threads=self._threads, clock=self._clock)

    def restore(
        self, rows: VectorRows, graph: SearchGraph | None, indexed: int, recall: float = 1.0
    ) -> None:
        """Take over what was loaded at start: the rows, the graph over the first `indexed`, and its recall."""
        self._state.view = IndexView(rows, graph, indexed)
        if graph is not None:
            kind = GraphIndex(self._state, self.metric, threads=self._threads, clock=self._clock)
            kind.restored(indexed, recall)
            self.now = kind
        self._change()

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""
        self.now.publish(vectors, labels, numbers, removed)

    def search(self, queries: Floats, k: int, *, effort: Effort | None = None) -> Neighbours:
        """Find the k nearest of each prepared query, without a filter and without being remembered."""
        return self.now.search(queries, k, effort=effort, remember=False)

    def maintain(self) -> bool:
        """Change the kind if another fits better, or do one bounded piece of its work; True if there may be more."""
        if self._change():
            return True
        return self.now.maintain()

    def choice(self) -> KindChoice:
        """Return the kind that fits the rows there are now, and why."""
        live = self.rows.live_count
        small = live < self._exact_below
        facts = IndexFacts(
            live=live,
            dimension=self._dimension,
            exact_below=self._exact_below,
            recall_goal=search_path.RECALL_GOAL,
            graph_bytes=graph_bytes(live, self._dimension),
            room_bytes=None if small or self.now.kind == "graph" else self._room(),
            now=self.now.kind,
        )
        return choose_kind(facts)

    def _change(self) -> bool:
        kind = self.choice().kind
        if kind == self.now.kind:
            return False
        if kind == "exact":
            self._state.drop_graph()
        self.now = self._of(kind)
        if self._closed:
            self.now.close()
        return True

    def close(self) -> None:
        """Stop background work in progress at its next step."""
        self._closed = True
        self.now.close()
