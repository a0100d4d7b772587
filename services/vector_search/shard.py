"""One shard of a collection, without the bus: takes writes, answers searches, and keeps every acknowledged write.

A batch of writes is staged by `apply` and becomes durable and visible in `sync`: log synced, database committed,
index published, in this order. A failure before the commit takes the whole batch back.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from common.clock import SYSTEM, Clock
from common.config import SearchConfig
from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.wire.message import BadMessage, decode
from common.wire.registry import CollectionRecord
from common.wire.search import (
    DocumentsResult,
    DocumentsWork,
    Effort,
    SearchReport,
    SearchResult,
    SearchWork,
    Write,
)
from services.vector_search import metrics, snapshot
from services.vector_search.calibration import Calibration
from services.vector_search.documents import Documents
from services.vector_search.explanation import explain
from services.vector_search.filter_masks import FilterMasks
from services.vector_search.filters import Filter
from services.vector_search.hit_cache import HitCache
from services.vector_search.index.index import Index
from services.vector_search.index.port import Neighbours
from services.vector_search.index.quantizer_source import QuantizerSource
from services.vector_search.index.rows import Flags, Floats, prepare
from services.vector_search.index.search_path import AUDITED
from services.vector_search.ranked_search import RankedSearch
from services.vector_search.search_cost import BudgetFit, BudgetPicker, SearchCost
from services.vector_search.shard_map import ShardMap
from services.vector_search.storage_errors import is_full, reserve, storage_error
from services.vector_search.tuning.shard_tuning import ShardTuning
from services.vector_search.write_batch import WriteBatch, encoded, vectors_of
from services.vector_search.write_log import EntryId, WriteLog, format_id, parse_id

Outcome = Literal["applied", "old", "repeated", "refused"]
_ATTEMPTS = 5
_GRAPH_GROWTH = 1.1
_LEARN_EVERY = 16  # without a time budget only each 16th search is learned from
MAX_K = 10_000
DATABASE = "documents.sqlite"
_WALKED = frozenset(
    {"graph", "ivfpq", "scan"}
)  # paths of searches without a filter: audits repeat their queries


class Shard:
    """The shard in one directory. `apply`, `sync`, `snapshot` and `maintain` may come from different threads.

    Opening recovers: the damaged tail of the log is cut off, the rest replayed over the database. Errors are
    SpillwayErrors: `disk_full` (nothing changed, try again), `shard_damaged` (opening), `invalid_filter`,
    `dimension_mismatch`, `invalid_vector`.
    """

    def __init__(
        self,
        directory: Path,
        record: CollectionRecord,
        config: SearchConfig,
        *,
        threads: int = 1,
        clock: Clock = SYSTEM,
        quantizers: QuantizerSource | None = None,
    ) -> None:
        self.record = record
        self.dropped = False
        self.directory = directory
        self._config, self._clock = config, clock
        self._name = f"{record.id}/{directory.name}"
        self._writing = threading.RLock()
        self._publishing = threading.Lock()
        self._batch: WriteBatch | None = None
        self._snapshot_rows = 0
        self._cost = SearchCost()
        self._calibration = Calibration(self._cost, self._timed)
        self._searches = 0
        self._counting = threading.Lock()
        self._searched = Counter[str]()  # queries by the path taken
        self._audited_s: float | None = None
        self._remembered = self._compared = 0  # queries kept, queries of the last audit
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._log = WriteLog(directory)
            self._documents = Documents(directory / DATABASE)
            self._index = Index(
                record.dimension,
                record.metric,
                exact_below=config.exact_below,
                threads=threads,
                clock=clock,
                quantizers=quantizers,
            )
            self._load(threads)
            self._masks = FilterMasks(self._documents)
            self._hits = HitCache(self._documents)
            self._ranked = RankedSearch(
                record, self._documents, self._index, self._masks, self._hits, self._publishing
            )
            self.tuning = ShardTuning(directory, self._index, threads, clock)
            self._map = ShardMap(self._index, self._documents, record.dimension, clock)
            self._replay()
        except (sqlite3.Error, OSError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> SpillwayError:
        if is_full(error):
            return storage_error(error)
        reason = error.strerror if isinstance(error, OSError) else error
        return Unavailable(
            f"shard {self._name} cannot be opened: {reason}; expected the files of a shard in its directory",
            code="shard_damaged",
            retry_after_s=5,
        )

    def _load(self, threads: int) -> None:
        saved = snapshot.load(self.directory, self.record.dimension, self.record.metric, threads)
        rows, structure, indexed = snapshot.load_rows(
            self._documents, self.record, saved, self.directory
        )
        self._index.restore(rows, structure, indexed, saved.recall if saved else 1.0)
        found = self._index.now.snapshot()
        self._snapshot_version = found.version if found else ""
        self._snapshot_rows = indexed

    def _replay(self) -> None:
        for entry, payload in self._log.entries():
            if entry > self._documents.applied:
                try:
                    write = decode(payload, Write)
                except BadMessage:
                    metrics.DAMAGED.labels(what="write").inc()
                    continue
                self._apply(entry, write, log=False)
                self.sync()

    # -- writing

    @property
    def applied(self) -> str:
        """The id of the last write that is durable and visible."""
        return format_id(self._documents.applied)

    def apply(self, entry_id: str, write: Write | None) -> Outcome:
        """Stage one write of the stream, None for an entry that is no write; durable and visible after `sync`.

        An id at or below the last is "old"; a (request, index) seen in the last 24 h is "repeated"; a write that
        does not fit the collection is "refused" and changes nothing. Unavailable(`disk_full`): the whole batch
        since the last sync is taken back, and must be applied again from `applied`.
        """
        outcome = self._apply(parse_id(entry_id), write, log=True)
        metrics.WRITES.labels(outcome=outcome).inc()
        return outcome

    def _apply(self, entry: EntryId, write: Write | None, *, log: bool) -> Outcome:
        with self._writing:
            last = self._batch.applied if self._batch else self._documents.applied
            if entry <= last:
                return "old"
            try:
                if self._batch is None:
                    reserve(self.directory)
                    self._documents.begin()
                    self._batch = WriteBatch(last, self._log.mark())
                payload = encoded(write) if write is not None else None
                outcome: Outcome = "refused"
                if payload and write is not None:
                    outcome = self._stage(self._batch, entry, write)
                if log and payload and outcome == "applied":
                    self._log.append(entry, payload)
                self._batch.applied = entry
            except (OSError, sqlite3.Error) as error:
                self._take_back()
                raise storage_error(error) from error
            return outcome

    def _stage(self, batch: WriteBatch, entry: EntryId, write: Write) -> Outcome:
        if not self._documents.first_time(write.request, write.index, entry[0]):
            return "repeated"
        if write.drop:
            self.dropped = True
            return "applied"
        vectors = vectors_of(write, self.record)
        if vectors is None or not batch.stage(write, vectors, self._documents):
            return "refused"
        return "applied"

    def sync(self) -> None:
        """Make the staged batch durable, then visible. Unavailable(`disk_full`): the batch is taken back."""
        with self._writing:
            batch = self._batch
            if batch is None:
                return
            try:
                with metrics.SYNC_SECONDS.time():
                    self._log.sync()
                with self._publishing:
                    self._documents.commit(batch.applied)
                    self._batch = None
                    self._publish(batch)
            except (OSError, sqlite3.Error) as error:
                self._take_back()
                raise storage_error(error) from error
            rows = self._index.rows
            metrics.VECTORS.labels(index=self._name).set(rows.live_count)
            metrics.DELETED_RATIO.labels(index=self._name).set(rows.deleted_ratio)
            metrics.LOG_BYTES.labels(index=self._name).set(self._log.size)

    def _publish(self, batch: WriteBatch) -> None:
        self._masks.extend(batch.attributes)
        empty = np.zeros((0, self.record.dimension), np.float32)
        self._index.publish(
            np.concatenate([empty, *batch.vectors]),
            np.array(batch.labels, np.int64),
            np.array(batch.numbers, np.int64),
            np.array(batch.removed, np.int64),
        )

    def _take_back(self) -> None:
        batch, self._batch = self._batch, None
        self.dropped = False
        self._documents.rollback()
        if batch is not None:
            self._log.rollback(batch.mark)

    # -- reading

    def search(self, work: SearchWork, spent_s: float = 0.0) -> SearchResult:
        """Search with one or many queries; the hits include all writes up to the result's `applied`.

        `spent_s` are the seconds of the work's time budget that have passed, if it has one.
        """
        began_s = self._clock.perf_s()
        queries = self._queries(work)
        if work.mode != "vector" or work.depth:
            with metrics.SEARCH_SECONDS.time():
                return self._ranked.search(queries, work)
        condition = Filter(work.filter) if work.filter else None
        picker = None
        if work.budget_ms is not None:
            due_s = began_s + work.budget_ms / 1000 - spent_s
            picker = BudgetPicker(self._cost, self._clock, due_s)
        for attempt in range(_ATTEMPTS):
            # A found chunk may be deleted from the database before the index. Then search again; the last attempt holds
            # the next write back.
            with self._publishing if attempt + 1 == _ATTEMPTS else nullcontext():
                applied = self.applied
                wanted = self._masks.get(condition) if condition else None
                found_s = self._clock.perf_s()
                with metrics.SEARCH_SECONDS.time():
                    found = self._index.now.search(
                        queries, work.k, effort=work.asked_effort, wanted=wanted, pick=picker
                    )
                rows = self._hits.of(found.labels, found.scores, work)
            if rows.complete:
                break
            with self._publishing:
                pass
        with self._counting:
            self._searched[found.path] += len(queries)
            if found.path in _WALKED and condition is None:
                self._remembered += 1
        ended_s = self._clock.perf_s()
        self._searches += 1
        if picker is not None or not self._searches % _LEARN_EVERY:
            self._cost.observe(found.plan, ended_s - found_s)
        if picker is not None and picker.fit is not None:
            self._cost.ended(picker.fit, ended_s - found_s)
        took_ms = round(1000 * (spent_s + ended_s - began_s), 3)
        report = SearchReport(
            self._index.now.kind,
            found.effort,
            took_ms,
            lists=found.lists,
            quantizer=found.quantizer,
            scanned=found.scanned().tolist() if work.with_lists and found.scanned else [],
        )
        if picker is not None and picker.fit is not None:
            report = self._kept(work, report, spent_s + found_s - began_s, picker.fit)
        return SearchResult(
            shown=rows.shown, scores=rows.scores, applied=applied, path=found.path, report=report
        )

    @staticmethod
    def _kept(
        work: SearchWork, report: SearchReport, before_s: float, fit: BudgetFit
    ) -> SearchReport:
        """Return the report of a search with a time budget, whose effort was chosen after `before_s`."""
        known = math.isfinite(fit.predicted_s)
        return msgspec.structs.replace(
            report,
            budget_ms=work.budget_ms,
            predicted_ms=round(1000 * (before_s + fit.predicted_s), 3) if known else None,
            fits=fit.fits,
        )

    def _queries(self, work: SearchWork) -> Floats:
        size = self.record.dimension * 4
        if work.mode != "text" and (not work.vectors or len(work.vectors) % size):
            raise InvalidRequest(
                f"{len(work.vectors)} bytes of query vectors; expected a multiple of {size}: collection "
                f"{self.record.name!r} has dimension {self.record.dimension}",
                code="dimension_mismatch",
            )
        if not work.whole(self.record.dimension):
            raise InvalidRequest(
                f"{len(work.texts)} texts for {work.queries(self.record.dimension)} queries; expected one each "
                f"in mode {work.mode!r}",
                param="texts",
            )
        if not 1 <= work.k <= MAX_K:
            raise InvalidRequest(f"k is {work.k}; expected 1 to {MAX_K}", param="k")
        effort = work.asked_effort
        if isinstance(effort, int) and not 1 <= effort <= MAX_K:
            raise InvalidRequest(
                f'effort is {effort}; expected 1 to {MAX_K}, or "exact"', param="effort"
            )
        if work.depth and not work.k <= work.depth <= MAX_K:
            raise InvalidRequest(f"depth is {work.depth}; expected k to {MAX_K}", param="k")
        vectors = np.frombuffer(work.vectors, "<f4").reshape(-1, self.record.dimension)
        if not np.isfinite(vectors).all():
            raise InvalidRequest("query vectors hold NaN or infinity", code="invalid_vector")
        return prepare(vectors, self.record.metric)

    def documents(self, work: DocumentsWork) -> DocumentsResult:
        """Read documents by id, a page of documents, the statistics, the explanation of a search, or the map."""
        applied = self.applied
        if work.op == "map":
            return DocumentsResult(map=self._map.read(work), applied=applied)
        if work.op == "stats":
            return DocumentsResult(stats=self.stats(), applied=applied)
        if work.op == "explain":
            wanted = self._masks.get(Filter(work.filter)) if work.filter else None
            told = explain(self._index, self._cost, min(max(work.k, 1), MAX_K), wanted)
            return DocumentsResult(stats=told, applied=applied)
        if work.op == "get":
            found = self._documents.get(work.ids, text=work.with_text, vectors=work.with_vectors)
            return DocumentsResult(documents=found, applied=applied)
        page, cursor = self._documents.page(
            work.cursor,
            max(1, work.limit),
            Filter(work.filter) if work.filter else None,
            text=work.with_text,
            vectors=work.with_vectors,
        )
        return DocumentsResult(documents=page, cursor=cursor, applied=applied)

    def stats(self) -> dict[str, Any]:
        """Return counts, bytes on disk, the state of the index, and the number of searches by path since the start.

        The last audit compared `compared` queries at `audited_at` (seconds); None: the recall was measured at the
        build.
        """
        index = self._index.now.stats()
        effort = index.effort
        with self._counting:
            searched = dict(self._searched)
        return {
            "documents": self._documents.count,
            "chunks": index.live,
            "deleted_ratio": round(index.deleted_ratio, 4),
            "bytes": self._documents.size + self._log.size,
            "log_bytes": self._log.size,
            "torn_tails": self._log.torn,
            "applied": self.applied,
            "index": index.path,
            "newer": index.newer,
            "effort": effort,
            "ef": effort if isinstance(effort, int) else 0,
            "recall": round(index.recall, 4),
            "text_indexed": round(self._documents.texts.share, 4),
            "audited_at": self._audited_s,
            "compared": self._compared,
            "searches": searched,
        }

    @property
    def chunks(self) -> int:
        """The number of live vectors."""
        return self._index.rows.live_count

    def probe(self, queries: int) -> float:
        """Return the seconds of one batch of `queries` searches, document lookups included."""
        rng = np.random.default_rng(queries)
        vectors = rng.standard_normal((queries, self.record.dimension)).astype(np.float32)
        return self._timed(prepare(vectors, self.record.metric), None, None)[1]

    def _timed(
        self, queries: Floats, effort: Effort | None, wanted: Flags | None
    ) -> tuple[Neighbours, float]:
        """Search for ten hits of each query; return the neighbours and the seconds, document lookups included."""
        work = SearchWork(collection=self.record.id, vectors=b"", k=10)
        began_s = self._clock.perf_s()
        found = self._index.now.search(
            queries, work.k, effort=effort, wanted=wanted, remember=False
        )
        self._hits.of(found.labels, found.scores, work)
        return found, self._clock.perf_s() - began_s

    # -- background, one thread

    def maintain(self) -> bool:
        """Do one bounded piece of indexing or compaction; True if there may be more."""
        if self._index.maintain() or self._index_texts():
            return True
        self._calibration.keep(self._index, self._documents.next_number)
        return False

    def _index_texts(self) -> bool:
        """Add a piece of the texts stored by versions without an index of texts; True if more are left."""
        if not self._documents.texts.pending:
            return False
        try:
            with self._writing:
                self.sync()
                self._documents.texts.build()
        except sqlite3.Error as error:
            raise storage_error(error) from error
        return self._documents.texts.pending > 0

    def audit(self) -> float:
        """Measure the recall of recent queries and publish it; too low a recall raises the effort."""
        recall = self._index.now.audit()
        effort = self._index.now.stats().effort
        if self._index.now.kind != "exact" and self._remembered:
            self._compared = min(self._remembered, AUDITED)
            self._audited_s = self._clock.now_ms() / 1000
        metrics.RECALL_RATIO.labels(index=self._name).set(recall)
        metrics.EF.labels(index=self._name).set(effort if isinstance(effort, int) else 0)
        return recall

    def lacks_map(self, work: DocumentsWork) -> bool:
        """Return whether the map that a work asks for is not drawn yet; if so, ask for it."""
        return self._map.lacks(work)

    def draw_map(self) -> bool:
        """Draw the map that was last asked for; False if there was none to draw. May run beside `maintain`."""
        return self._map.draw()

    def call_when_map_wanted(self, wanted: Callable[[], object]) -> None:
        """Call `wanted`, from any thread, whenever `draw_map` has a map to draw."""
        self._map.wanted = wanted

    @property
    def audit_due(self) -> bool:
        """True once there are enough queries for a first audit of the graph or lists."""
        return self._index.now.audit_due

    @property
    def log_bytes(self) -> int:
        """Bytes of writes that the last snapshot does not cover."""
        return self._log.size

    @property
    def snapshot_due(self) -> bool:
        """True once the log has grown past the configured bytes."""
        return self._log.size >= self._config.snapshot_bytes

    def snapshot(self) -> str | None:
        """Remove the log's writes that the database now holds; return the last one's id, None if readers hindered it.

        Searches go on; writes wait while the database is checkpointed.
        """
        began_s = self._clock.perf_s()
        try:
            with self._writing:
                self.sync()
                segments = self._log.rotate()
                applied = self._documents.applied
                if not self._documents.checkpoint(applied[0]):
                    return None
                self._log.remove(segments)
        except (OSError, sqlite3.Error) as error:
            raise storage_error(error) from error
        metrics.LOG_BYTES.labels(index=self._name).set(self._log.size)
        metrics.SNAPSHOT_SECONDS.observe(self._clock.perf_s() - began_s)
        return format_id(applied)

    def keep_graph(self) -> bool:
        """Save the index's graph or lists if their size has changed much since the last save; True if saved."""
        saved = self._index.now.snapshot()
        if saved is None:
            self.tuning.keep()
            return False
        low, high = self._snapshot_rows / _GRAPH_GROWTH, self._snapshot_rows * _GRAPH_GROWTH
        if low < len(saved.labels) < high and saved.version == self._snapshot_version:
            self.tuning.keep()
            return False
        try:
            snapshot.save(self.directory, saved, self.applied)
        except (OSError, RuntimeError) as error:
            raise storage_error(error) from error
        self._snapshot_rows, self._snapshot_version = len(saved.labels), saved.version
        self.tuning.keep()
        return True

    @property
    def settled(self) -> bool:
        """Whether the graph or lists are built, or their training failed, and all texts are indexed."""
        built = self._index.now.stats().path == self._index.choice().kind or self._index.problem
        return bool(built) and not self._documents.texts.pending

    def close(self) -> None:
        """Sync staged writes, stop background work at its next step, and close the files."""
        self._index.close()
        with self._writing:
            try:
                self.sync()
            finally:
                self._log.close()
                self._documents.close()
                gauges = (metrics.VECTORS, metrics.DELETED_RATIO, metrics.LOG_BYTES)
                for gauge in (*gauges, metrics.RECALL_RATIO, metrics.EF):
                    gauge.remove(self._name)
