"""Metrics of the bus in every process: ends of jobs, durations of commands, and the names of lanes in labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Histogram

from common.ids import Family
from common.metrics import ATTEMPTS, SHORT_S

JOBS = Counter(
    "spillway_jobs_total",
    "Jobs by how they ended; fenced: a late result of a job that is another worker's by then.",
    ("lane", "outcome"),
)
JOB_ATTEMPTS = Histogram(
    "spillway_job_attempts",
    "Deliveries of a job so far, counted at each of them.",
    ("lane",),
    buckets=ATTEMPTS,
)
CALL_SECONDS = Histogram(
    "spillway_bus_call_seconds",
    "Round trip of one command or script that Redis answered.",
    buckets=SHORT_S,
)
LEASES_LOST = Counter(
    "spillway_leases_lost_total",
    "Leases of workers that died or hung, found by another one.",
    ("lane",),
)
USE_DIFFERENCES = Counter(
    "spillway_use_differences_total",
    "Times the use of a lane differed from its entries when it was counted anew; each is a bug.",
)

BAD_ENTRIES = Counter(
    "spillway_bad_entries_total",
    "Entries of streams that could not be read: those of lanes became dead letters, the others were skipped.",
    ("stream",),
)

_OUTCOMES = {"result": "ok"}


def lane_label(family: Family, cls: str) -> str:
    """Return a lane's name for metrics, `embed.minilm/0:gpu`.

    There may be many lanes of searches and of single workers: these count as `search:cpu`, and as `own`.
    """
    name = family.name if family.name == "search" else str(family)
    return f"{name}:{'own' if cls.startswith('w.') else cls}"


def served(family: Family, classes: Iterable[str]) -> None:
    """Create the counters of the lanes served here, at 0: a counter that first appears at 1 shows no increase."""
    for cls in classes:
        label = lane_label(family, cls)
        JOBS.labels(label, "ok")
        LEASES_LOST.labels(label)
        BAD_ENTRIES.labels(label)


def ended(family: Family, cls: str, kind: str, times: int = 1) -> None:
    """Count jobs of a lane by the kind of event they ended with, or "fenced"."""
    JOBS.labels(lane_label(family, cls), _OUTCOMES.get(kind, kind)).inc(times)
