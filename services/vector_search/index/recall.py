"""The recall of an index's graph: ef is the least that finds what exact search finds, for queries of its users."""

from __future__ import annotations

from services.vector_search.index import exact, search_path
from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.followed_plan import FollowedPlan
from services.vector_search.index.native_graph import SearchGraph
from services.vector_search.index.recent_queries import RecentQueries
from services.vector_search.index.rows import Floats, Ints
from services.vector_search.index.search_path import AUDITED
from services.vector_search.index.state import IndexView


class RecallAudit:
    """Remembers recent queries, measures how many of their true neighbours the graph finds, and sets its ef by that.

    One thread tunes and audits; any number remember queries.
    """

    def __init__(self, followed: FollowedPlan) -> None:
        self.recall = 1.0
        self._followed = followed
        self._recent = RecentQueries()
        self._audited = False

    def remember(self, queries: Floats) -> None:
        """Keep one query of a batch: another place of every batch, so that a repeated request is not all there is."""
        self._recent.remember(queries)

    @property
    def recent(self) -> Floats:
        """The queries that are remembered, the latest last."""
        return self._recent.all()

    def renew(self) -> None:
        """Have the next graph audited as soon as enough queries have come."""
        self._audited = False

    def due(self, view: IndexView) -> bool:
        """Return whether enough queries have come for the first audit of this graph."""
        return not self._audited and self._recent.full and view.graph is not None

    def audit(self, view: IndexView) -> float:
        """Compare recent queries with exact search; raise ef where recall fell short. Returns the recall."""
        recent = self.recent
        if view.graph is None or not view.indexed:
            self.recall = 1.0
        elif len(recent):
            # Without a margin: a query that is asked again and again would raise ef by chance.
            self.tune(view.graph, view, recent, least=view.graph.ef, margin=0.0)
            self._audited = self._audited or len(recent) == AUDITED
        return self.recall

    def tune(
        self,
        graph: SearchGraph,
        view: IndexView,
        queries: Floats,
        *,
        least: int = 0,
        held_out: Ints | None = None,
        margin: float = search_path.SURE,
    ) -> None:
        """Set the least ef of the ladder, from `least` on, whose recall lies `margin` standard errors above the goal.

        The queries, and the rows `held_out`, must not be in the graph: it finds neighbours of its own rows too easily.
        """
        truth = _truth(graph, view, queries, held_out)
        for ef in search_path.EF_LADDER:
            if ef < least:
                continue
            if ef != graph.ef:
                graph.set_ef(ef)
            found, _ = graph.query(queries, 10)
            shares = _shares(found, truth)
            self.recall = float(shares.mean()) if len(shares) else 1.0
            error = float(shares.std()) / max(len(shares), 1) ** 0.5
            if self.recall - margin * error >= self._followed.goal:
                return


def recall_of(graph: SearchGraph, view: IndexView, queries: Floats, held_out: Ints) -> float:
    """Return the share of their true neighbours that queries find; rows that are held out are none of them."""
    found, _ = graph.query(queries, 10)
    shares = _shares(found, _truth(graph, view, queries, held_out))
    return float(shares.mean()) if len(shares) else 1.0


def _truth(graph: SearchGraph, view: IndexView, queries: Floats, held_out: Ints | None) -> Ints:
    rows, covered = view.rows.view, view.indexed
    mask = rows.live[:covered].copy()
    if held_out is not None:
        mask[held_out] = False
    return exact.top_k(queries, rows.matrix[:covered], 10, graph.metric, AllowedRows(mask))[0]


def _shares(found: Ints, truth: Ints) -> Floats:
    """Return the share of its true nearest that each query found."""
    shares: Floats = (truth[:, :, None] == found[:, None, :]).any(axis=2).mean(axis=1)
    return shares
