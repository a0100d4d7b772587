"""The port that every kind of index fits: what a shard asks of its vectors, whichever way they are searched.

How much of an index a search looks at is its *effort*: more finds more of the true neighbours and takes longer.

- *exact* compares every row; its only effort is "exact".
- *graph* walks a graph over the older rows and compares the newer ones; its effort is how many candidates a walk keeps.
- *ivfpq* reads the inverted lists nearest to a query: codes of the older rows, in memory, of which the best are
  compared by their rows, which may lie on the disk, and the newer rows one by one; its effort is how many lists are
  read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from services.vector_search.index.quantizer import Coding
from services.vector_search.index.rows import Flags, Floats, Ints

Kind = Literal["exact", "graph", "ivfpq"]
Effort = int | Literal["exact"]
Path = Literal[
    "exact", "graph", "ivfpq", "filtered-exact", "filtered-graph", "filtered-ivfpq", "scan"
]


class EffortPlan(NamedTuple):
    """How a search would go: its path, the effort it uses, and `factors`, in which the time of a path is linear."""

    path: Path
    effort: Effort
    factors: tuple[float, ...]


Pick = Callable[[Sequence[EffortPlan]], EffortPlan]


class Neighbours(NamedTuple):
    """Labels and scores of each query (rows of a matrix, or a list), best first, the plan, and the path that was gone.

    The path is the plan's, or "scan" where that did not find enough. Of each query so many `lists` were read, made by
    the quantizer of this hash; `scanned` names them, (queries, lists), the nearest first.
    """

    labels: list[Ints] | Ints
    scores: list[Floats] | Floats
    plan: EffortPlan
    path: Path
    lists: int = 0
    quantizer: str = ""
    scanned: Callable[[], Ints] | None = None

    @property
    def effort(self) -> Effort:
        """The effort that was used."""
        return "exact" if self.path == "scan" else self.plan.effort


class Rung(NamedTuple):
    """One effort of a kind's ladder, and the share of true neighbours it was last measured to find (None: not yet)."""

    effort: Effort
    recall: float | None


class IndexStats(NamedTuple):
    """How an index stands: `newer` rows are compared one by one by every search, since its structure lacks them.

    `path` is the way of a search without a filter, `effort` what such a search uses, and `recall` what that was last
    measured to find. `bytes` are those in memory, by what they hold, `quantizer` is the hash of what lists are made
    by, "" without lists, `coding` how rows in lists are coded.
    """

    live: int
    deleted_ratio: float
    newer: int
    path: Path
    effort: Effort
    recall: float
    bytes: dict[str, int]
    quantizer: str = ""
    coding: Coding | None = None


class IndexSnapshot(NamedTuple):
    """What a start needs to search at once: `save` writes the structure over the rows of `labels` to a file.

    `version` names what codes were made with, or how many links a node has: another one is to be saved.
    """

    kind: Kind
    labels: Ints
    effort: int
    recall: float
    save: Callable[[str], None]
    version: str = ""


class VectorIndex(Protocol):
    """Vectors by label, of one kind. One thread calls `publish`, one `maintain` and `audit`; any number search.

    Scores: cosine, dot product or negative Euclidean distance; higher is nearer.
    """

    @property
    def kind(self) -> Kind:
        """The name of the kind."""

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""

    def maintain(self) -> bool:
        """Do one bounded piece of building, growing or tidying, if there is any; True if there may be more."""

    def take_in(self) -> bool:
        """Put some of the newer rows into the structure there is, and build nothing anew; True if there may be more."""

    def search(
        self,
        queries: Floats,
        k: int,
        *,
        effort: Effort | None = None,
        wanted: Flags | None = None,
        pick: Pick | None = None,
        remember: bool = True,
    ) -> Neighbours:
        """Find the k nearest of each prepared query; `wanted` marks document numbers a filter allows.

        Returns fewer than k only if fewer match. Numbers past the end of `wanted` are not allowed. Without an `effort`
        the index uses the least that finds enough; `pick` chooses one of the ladder's plans instead. `remember` lets
        `audit` use the query.
        """

    def plans(self, queries: int, k: int, wanted: Flags | None = None) -> list[EffortPlan]:
        """Return the plan of each effort of the ladder for a batch of so many queries, the least effort first."""

    def ladder(self) -> list[Rung]:
        """Return the efforts that a search with a time budget chooses from, the least first."""

    def matching(self, wanted: Flags) -> int:
        """Return how many live rows a filter allows."""

    def stats(self) -> IndexStats:
        """Return how the index stands."""

    def audit(self) -> float:
        """Compare recent queries with exact search; raise the effort where recall fell short. Returns the recall."""

    @property
    def audit_due(self) -> bool:
        """True once enough queries have come for the first audit."""

    def snapshot(self) -> IndexSnapshot | None:
        """Return what to save, None if a start needs only the rows; call between calls of `maintain`."""

    def close(self) -> None:
        """Stop background work in progress at its next step."""
