"""Searches of a shard by words, by vectors and words, and for diversity."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from common.errors import InvalidRequest
from common.wire.registry import CollectionRecord
from common.wire.search import NO_TEXTS, SearchResult, SearchWork
from services.vector_search import candidates, metrics
from services.vector_search.documents import Documents
from services.vector_search.filter_masks import FilterMasks
from services.vector_search.filters import Filter
from services.vector_search.hit_cache import HitCache
from services.vector_search.index.index import Index
from services.vector_search.index.rows import Flags, Floats, Ints
from services.vector_search.text_index import TextMatches
from services.vector_search.write_log import format_id

_ATTEMPTS = 5


class RankedSearch:
    """Searches texts, and ranks the chunks of one or two searches. Writers publish batches under `publishing`."""

    def __init__(
        self,
        record: CollectionRecord,
        documents: Documents,
        index: Index,
        masks: FilterMasks,
        hits: HitCache,
        publishing: threading.Lock,
    ) -> None:
        self._record, self._documents, self._index = record, documents, index
        self._masks, self._hits, self._publishing = masks, hits, publishing

    def search(self, queries: Floats, work: SearchWork) -> SearchResult:
        """Search with one or many queries, checked and prepared; InvalidRequest (`no_texts`) if no chunk has a text."""
        condition = Filter(work.filter) if work.filter else None
        find = self._candidates if work.depth else self._by_words
        for _ in range(_ATTEMPTS):
            applied = format_id(self._documents.applied)
            found, complete = find(queries, condition, work)
            if complete:
                break
        found = msgspec.structs.replace(found, applied=applied)
        return found if work.mode == "vector" else self._about_texts(found, work)

    def _about_texts(self, found: SearchResult, work: SearchWork) -> SearchResult:
        """Return a search's result with the number of texts; InvalidRequest if no chunk has a text."""
        texts = self._documents.texts.count if self._index.rows.live_count else -1
        share = self._documents.texts.share
        if work.alone and texts == 0 and share == 1.0:
            raise InvalidRequest(NO_TEXTS, code="no_texts", param="mode")
        return msgspec.structs.replace(found, texts=texts, text_indexed=share)

    def _by_words(
        self, _: Floats, condition: Filter | None, work: SearchWork
    ) -> tuple[SearchResult, bool]:
        """Return the best k hits by their words, and whether every found chunk still exists."""
        matches = self._matches(condition, work, work.k)
        rows = self._hits.of([m.labels for m in matches], [m.scores for m in matches], work)
        result = SearchResult(
            shown=rows.shown, scores=rows.scores, applied="", path="text", mode="text"
        )
        return result, rows.complete

    def _candidates(
        self, queries: Floats, condition: Filter | None, work: SearchWork
    ) -> tuple[SearchResult, bool]:
        """Return candidates, ranked if the work is `alone`, and whether every found chunk still exists."""
        count = work.queries(self._record.dimension)
        path: str = "text"
        labels: Sequence[Ints] | Ints = []
        scores: Sequence[Floats] | Floats = []
        matches: list[TextMatches] | list[None] = [None] * count
        if work.mode != "text":
            wanted = self._masks.get(condition) if condition else None
            found = self._index.now.search(
                queries, work.depth, effort=work.asked_effort, wanted=wanted
            )
            path, labels, scores = found.path, found.labels, found.scores
        if work.mode != "vector":
            matches = self._matches(condition, work, work.depth)
        with self._publishing:  # the index now has all chunks that the text search read
            view = self._index.rows.view
        asked: list[Floats | None] = [None] * count if work.mode == "text" else list(queries)
        every = [
            candidates.candidates(
                query,
                None if query is None else (labels[at].tolist(), scores[at].tolist()),
                match,
                view,
                self._record.metric,
                work,
            )
            for at, (query, match) in enumerate(zip(asked, matches, strict=True))
        ]
        known = {label for one in every for label in one.labels}
        hits = self._hits.json_of(known, work)
        result = msgspec.structs.replace(candidates.result(every, asked, hits, work), path=path)
        return result, len(hits) == len(known) and all(one.complete for one in every)

    def _matches(self, condition: Filter | None, work: SearchWork, most: int) -> list[TextMatches]:
        """Return the matches of the queries' texts."""

        def keep(labels: Ints) -> Flags:
            assert condition is not None
            with self._publishing:  # the index now has all chunks that the text search reads
                view = self._index.rows.view
            wanted = self._masks.get(condition)
            rows = view.find(labels)
            numbers = view.numbers[rows.clip(min=0)]
            good: Flags = wanted[numbers.clip(max=len(wanted) - 1)] & (numbers < len(wanted))
            good[rows < 0] = False
            return good

        metrics.BY_PATH["text"].inc(len(work.texts))
        return [
            self._documents.texts.search(
                text, most, self._index.rows.live_count, keep if condition else None
            )
            for text in work.texts
        ]
