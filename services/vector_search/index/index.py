"""The index of one shard: of the kind that fits it now, and of another once that fits better.

The kinds share the rows, so a change of kind loses no write. From exact search the new kind takes over at once, and
builds its structure beside the searches; a structure that there is goes on answering until the other one is built. Only
where memory does not hold a graph and the training of lists does the graph go first, and rows are compared meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from common.clock import SYSTEM, Clock
from common.wire.tuning import MeasuredPlan
from services.vector_search.index.chooser import IndexFacts, KindChoice, choose_kind
from services.vector_search.index.exact_index import ExactIndex
from services.vector_search.index.followed_plan import FollowedPlan
from services.vector_search.index.graph_index import GraphIndex
from services.vector_search.index.inverted_lists import InvertedLists, lists_bytes
from services.vector_search.index.ivfpq_index import IvfpqIndex
from services.vector_search.index.lists_maintenance import lists_for
from services.vector_search.index.memory import room_bytes
from services.vector_search.index.native_graph import SearchGraph, graph_bytes
from services.vector_search.index.port import Effort, Kind, Neighbours, VectorIndex
from services.vector_search.index.quantizer_source import OwnQuantizer, QuantizerSource
from services.vector_search.index.quantizer_training import Trainer, train_apart
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows
from services.vector_search.index.state import IndexState, IndexView
from services.vector_search.index.training_room import LEAST_ROWS, sample_rows

# Memory that a structure may take as it grows, as a share of what it takes: room for more is made by a larger copy.
_GROWN = 1.5


class Index:
    """Vectors by label; `now` is the index in use. One thread calls `publish`, one `maintain`; any number search.

    `room` tells the bytes that structures may take, `training_room` those that a training may; None if unknown.
    """

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
        training_room: Callable[[], int | None] = room_bytes,
        trainer: Trainer = train_apart,
        quantizers: QuantizerSource | None = None,
    ) -> None:
        self.metric: Metric = metric
        self._dimension, self._exact_below = dimension, exact_below
        self._threads, self._clock, self._room = threads, clock, room
        self._trainer, self._training_room = trainer, training_room
        self._quantizers = quantizers if quantizers is not None else OwnQuantizer()
        self._state = IndexState(dimension)
        self._closed = False
        self._next: VectorIndex | None = None  # builds what takes the place of `now`
        self.now = self._of("exact")

    @property
    def followed(self) -> FollowedPlan:
        """The plan of a tuning that the index keeps to."""
        return self._state.followed

    @property
    def rows(self) -> VectorRows:
        """The rows of the shard, deleted ones among them until they are dropped."""
        return self._state.view.rows

    @property
    def lists(self) -> InvertedLists | None:
        """The lists over the older rows, if there are any."""
        return self._state.view.lists

    def _of(self, kind: Kind) -> VectorIndex:
        if kind == "graph":
            return self._graph_index()
        if kind == "ivfpq":
            return self._ivfpq_index()
        return ExactIndex(self._state, self.metric, threads=self._threads, clock=self._clock)

    def _graph_index(self) -> GraphIndex:
        return GraphIndex(self._state, self.metric, threads=self._threads, clock=self._clock)

    def _ivfpq_index(self) -> IvfpqIndex:
        return IvfpqIndex(
            self._state,
            self.metric,
            threads=self._threads,
            clock=self._clock,
            trainer=self._trainer,
            quantizers=self._quantizers,
            training_room=self._training_room,
        )

    def restore(
        self,
        rows: VectorRows,
        structure: SearchGraph | InvertedLists | None,
        indexed: int,
        recall: float = 1.0,
    ) -> None:
        """Take over what was loaded at start: rows, the graph or lists over the first `indexed`, and their recall."""
        if isinstance(structure, InvertedLists):
            self._state.view = IndexView(rows, None, 0, structure)
            lists = self._ivfpq_index()
            lists.restored(indexed, recall)
            self.now = lists
        else:
            self._state.view = IndexView(rows, structure, indexed)
            if structure is not None:
                graph = self._graph_index()
                graph.restored(indexed, recall)
                self.now = graph
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
        if self._next is None:
            return self.now.maintain()
        more = self._next.maintain()
        if self._next.stats().path == "exact":
            return more or (self._has_room_to_grow() and self.now.take_in())
        self._use(self._next)
        return True

    def choice(self) -> KindChoice:
        """Return the kind that fits the rows there are now, and why."""
        live = self.rows.live_count
        small, room = live < self._exact_below and self.now.kind == "exact", None
        if not small and (room := self._room()) is not None:
            room += self._built_bytes()
        facts = IndexFacts(
            live=live,
            dimension=self._dimension,
            exact_below=self._exact_below,
            recall_goal=self.followed.goal,
            graph_bytes=graph_bytes(live, self._dimension),
            lists_bytes=lists_bytes(live, self._dimension, lists_for(live)),
            room_bytes=room,
            now=self.now.kind,
            plan=self.followed.now.plan,
        )
        return choose_kind(facts)

    def _has_room_to_grow(self) -> bool:
        """Return whether memory holds the structure in use once more, since it may be copied as it grows."""
        room = self._room()
        return room is None or room >= _GROWN * self._built_bytes()

    def _built_bytes(self) -> int:
        """Return what the structure in use takes beside the rows."""
        return sum(size for what, size in self.now.stats().bytes.items() if what != "rows")

    def _in_the_way(self, kind: Kind) -> bool:
        """Return whether lists can be trained only once the graph in use is gone."""
        if (self.now.kind, kind) != ("graph", "ivfpq"):
            return False
        room = self._training_room()
        if room is None:
            return False
        least = min(LEAST_ROWS, self.rows.live_count)
        beside, alone = (
            sample_rows(least, self._dimension, each) for each in (room, room + self._built_bytes())
        )
        return not beside and alone > 0

    @property
    def problem(self) -> str:
        """Why the last training of lists failed, "" if none did."""
        lists = self._next or self.now
        return lists.problem if isinstance(lists, IvfpqIndex) else ""

    def _change(self) -> bool:
        """Begin to use another kind if one fits better; True if that answers from now on."""
        choice = self.choice()
        kind = choice.kind
        self._settle_plan(choice)
        if kind == self.now.kind:
            if self._next is not None:
                self._use(self.now)
            return False
        if "exact" in (kind, self.now.kind) or self._in_the_way(kind):
            self._use(self._of(kind))
            return True
        if self._next is None:
            self._next = self._of(kind)
            if self._closed:
                self._next.close()
        return False

    def _settle_plan(self, choice: KindChoice) -> None:
        """Refuse a plan that is not built yet and cannot be kept to; one that compares every row needs no building."""
        plan = self.followed.now.plan
        if plan is None or self.followed.now.measured is not None:
            return
        if choice.kind != plan.setting.kind:
            why = f"its kind, {plan.setting.kind}, does not fit now: {choice.why}"
            self.followed.refuse(plan, why)
        elif choice.kind == self.now.kind == "exact":
            self.followed.built(plan, MeasuredPlan(recall=1.0, error=0.0, queries=0))

    def _use(self, kind: VectorIndex) -> None:
        """Answer by a kind, and forget what others have built."""
        if kind.kind != "graph":
            self._state.drop_graph()
        if kind.kind != "ivfpq":
            self._state.take_lists(None)
        self.now, self._next = kind, None
        if self._closed:
            kind.close()

    def close(self) -> None:
        """Stop background work in progress at its next step."""
        self._closed = True
        for kind in (self.now, self._next):
            if kind is not None:
                kind.close()
