"""The recall of inverted lists: measured on recent queries, and the effort raised where it falls short."""

from __future__ import annotations

from services.vector_search.index.followed_plan import FollowedPlan
from services.vector_search.index.inverted_lists import InvertedLists
from services.vector_search.index.lists_tuning import (
    Places,
    Truth,
    recall_by_probes,
    recall_of,
    tune,
)
from services.vector_search.index.recent_queries import RecentQueries
from services.vector_search.index.rows import Floats, Ints, RowsView


class ListsRecall:
    """Chooses the effort of lists, and knows what it finds; one thread tunes and audits.

    `recall` is what searches were last measured to find, `by_probes` what they find with other numbers of lists.
    """

    def __init__(self, threads: int, followed: FollowedPlan) -> None:
        self.recent = RecentQueries()
        self.recall = 1.0
        self.by_probes: dict[int, float] = {}
        self._threads, self._followed = threads, followed
        self._audited = False

    def renew(self) -> None:
        """Have the next lists audited as soon as enough queries have come."""
        self._audited = False

    @property
    def due(self) -> bool:
        """Whether enough queries have come for the first audit of these lists."""
        return not self._audited and self.recent.full

    def tune(
        self,
        lists: InvertedLists,
        view: RowsView,
        queries: Floats,
        *,
        held_out: Ints | None = None,
    ) -> InvertedLists:
        """Return the lists with the cheapest effort that reaches the goal; `held_out` are rows not to be found."""
        keep = view.live.copy()
        if held_out is not None:
            keep[held_out] = False
        truth = Truth.of(lists, view, keep, queries)
        if not truth.rows.size:
            return lists
        places = Places.of(truth, lists, keep, self._threads)
        lists = tune(lists, places, self._followed.goal)
        self.by_probes = recall_by_probes(lists, places)
        self.recall = recall_of(truth, lists, view, keep, self._threads)
        return lists

    def proof(self, lists: InvertedLists, view: RowsView, queries: Floats, held_out: Ints) -> float:
        """Return what queries find that the effort was not chosen by; `held_out` are rows not to be found."""
        keep = view.live.copy()
        keep[held_out] = False
        return recall_of(Truth.of(lists, view, keep, queries), lists, view, keep, self._threads)

    def audit(self, lists: InvertedLists, view: RowsView) -> InvertedLists:
        """Compare recent queries with exact search; return the lists, with more effort if they fell short."""
        queries = self.recent.all()
        keep = view.live.copy()
        if not len(queries):
            return lists
        truth = Truth.of(lists, view, keep, queries)
        self._audited = self._audited or self.recent.full
        self.recall = recall_of(truth, lists, view, keep, self._threads)
        if not truth.rows.size:
            return lists
        places = Places.of(truth, lists, keep, self._threads)
        if self.recall < self._followed.goal:
            # Without a margin: a query that is asked again and again would raise the effort by chance.
            lists = tune(
                lists,
                places,
                self._followed.goal,
                least_probes=lists.probes,
                least_depth=lists.depth,
                margin=0.0,
            )
            self.recall = recall_of(truth, lists, view, keep, self._threads)
        self.by_probes = recall_by_probes(lists, places)
        return lists
