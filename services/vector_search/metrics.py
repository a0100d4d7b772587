"""The metrics of vector_search; `index` is the collection's id and shard."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

VECTORS = Gauge("spillway_index_vectors", "Live vectors", ["index"])
DELETED_RATIO = Gauge("spillway_index_deleted_ratio", "Deleted rows / all rows", ["index"])
RECALL_RATIO = Gauge(
    "spillway_index_recall_ratio", "Recall of sampled queries against exact search", ["index"]
)
EF = Gauge(
    "spillway_index_ef",
    "Effort of a search: candidates that a graph search keeps, or lists that are read",
    ["index"],
)
LOG_BYTES = Gauge(
    "spillway_index_log_bytes", "Bytes of the write log since the last snapshot", ["index"]
)
TORN_TAILS = Counter("spillway_index_torn_tails_total", "Damaged log tails cut off at start")
DAMAGED = Counter(
    "spillway_index_damaged_total", "Stored pieces whose checksum was wrong", ["what"]
)
WRITES = Counter("spillway_index_writes_total", "Writes read from the stream", ["outcome"])
APPLY_SECONDS = Histogram(
    "spillway_index_apply_seconds", "Applying one batch of writes, sync included", buckets=SECONDS
)
SYNC_SECONDS = Histogram("spillway_index_sync_seconds", "Syncing the log", buckets=SECONDS)
SNAPSHOT_SECONDS = Histogram(
    "spillway_index_snapshot_seconds", "Taking a snapshot", buckets=SECONDS
)
SEARCHES = Counter("spillway_index_searches_total", "Queries by the path taken", ["path"])
SEARCH_SECONDS = Histogram(
    "spillway_index_search_seconds", "One batch of queries, in the index", buckets=SECONDS
)
BUDGET_RATIO = Histogram(
    "spillway_index_budget_ratio",
    "Time taken / time budget of searches that have one",
    buckets=(0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0),
)
SLOW_PATHS = Counter(
    "spillway_index_slow_paths_total", "Queries that fell back to scanning a large set"
)
FAILURES = Counter("spillway_index_failures_total", "Queries that failed by our fault")
DISK_FULL = Counter("spillway_index_disk_full_total", "Batches of writes put off for want of space")
SHARDS = Gauge("spillway_index_shards", "Shards held", ["state"])
COMPACTIONS = Counter("spillway_index_compactions_total", "Indexes rebuilt and swapped in")

BY_PATH = {
    path: SEARCHES.labels(path=path)
    for path in (
        "exact",
        "graph",
        "ivfpq",
        "filtered-exact",
        "filtered-graph",
        "filtered-ivfpq",
        "scan",
        "text",
    )
}
for _what in ("write", "vector", "manifest", "snapshot", "shard"):
    DAMAGED.labels(what=_what)
for _state in ("open", "damaged"):
    SHARDS.labels(state=_state)
for _outcome in ("applied", "old", "repeated", "refused"):
    WRITES.labels(outcome=_outcome)
