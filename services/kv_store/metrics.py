"""The metrics of kv_store: its jobs on sessions, and the pages it keeps, by tier (redis, disk)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from common.metrics import DURATION_S

SECONDS = Histogram(
    "spillway_store_job_seconds", "Seconds a job on sessions took", ["op"], buckets=DURATION_S
)
ERASED = Counter("spillway_sessions_erased_total", "Sessions of which nothing is left", ["why"])
LEFT = Counter(
    "spillway_erase_repeats_total",
    "Times a deletion's scan still found something and went over it again",
)
PAGES_DOWN = Gauge(
    "spillway_pages_down_seconds",
    "Seconds since the Redis of KV pages last answered; 0 while it does",
)
PAGES = Gauge("spillway_stored_pages", "KV pages kept", ["tier"])
PAGE_BYTES = Gauge("spillway_stored_page_bytes", "Bytes of the KV pages kept", ["tier"])
PAGE_ROOM = Gauge("spillway_stored_page_limit_bytes", "Bytes that a tier may hold", ["tier"])
PINNED = Gauge(
    "spillway_pinned_page_bytes", "Bytes of the KV pages that pinned sessions keep in Redis"
)
EVICTED = Counter("spillway_page_evictions_total", "KV pages that left Redis for room", ["to"])
DROPPED = Counter("spillway_disk_drops_total", "KV pages that left the disk", ["why"])
REFUSED = Counter("spillway_disk_refusals_total", "KV pages that the disk did not take")
CORRUPT = Counter("spillway_corrupt_pages_total", "Damaged KV pages met and dropped", ["tier"])
RECALLS = Counter("spillway_page_recalls_total", "KV pages asked back from the disk", ["outcome"])
RECONCILED = Counter(
    "spillway_pages_reconciled_total", "Entries and bytes found wrong in Redis and mended", ["what"]
)
for _why in ("deleted", "expired"):
    ERASED.labels(why=_why)
for _tier in ("redis", "disk"):
    PAGES.labels(tier=_tier)
    PAGE_BYTES.labels(tier=_tier)
    PAGE_ROOM.labels(tier=_tier)
    CORRUPT.labels(tier=_tier)
for _to in ("disk", "nowhere"):
    EVICTED.labels(to=_to)
for _why in ("room", "expired", "erased"):
    DROPPED.labels(why=_why)
for _outcome in ("served", "missed"):
    RECALLS.labels(outcome=_outcome)
for _what in ("expired", "unindexed", "miscounted"):
    RECONCILED.labels(what=_what)
