"""The metrics of kv_store."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from common.metrics import DURATION_S

SECONDS = Histogram(
    "spillway_store_job_seconds", "Seconds a job on sessions took", ["op"], buckets=DURATION_S
)
ERASED = Counter("spillway_sessions_erased_total", "Sessions of which nothing is left", ["why"])
LEFT = Counter(
    "spillway_erase_repeats_total",
    "Times a deletion's scan still found something and went over it again",
)
for _why in ("deleted", "expired"):
    ERASED.labels(why=_why)
