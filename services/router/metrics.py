"""The router's metrics; every one has a panel or an alert."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram

from common.metrics import DURATION_S, PER_TOKEN_S, SHORT_S

REQUESTS = Counter(
    "spillway_requests", "Requests answered, by route and status.", ("route", "model", "status")
)
DURATION = Histogram(
    "spillway_request_duration_seconds",
    "From the request's first byte to the response's last.",
    ("route", "model"),
    buckets=DURATION_S,
)
REFUSED = Counter("spillway_refused", "Requests refused at the door.", ("reason",))
for _reason in ("depth", "tokens", "deadline", "no_worker", "bus_full", "quota", "draining"):
    REFUSED.labels(_reason)
ADMITTED = Counter("spillway_admitted", "Jobs admitted, by the lane that took them.", ("lane",))
DEPTH = Gauge("spillway_lane_depth", "What a lane may hold.", ("lane", "unit"))
USED = Gauge("spillway_lane_used", "What a lane holds, queued and running.", ("lane", "unit"))
OLDEST = Gauge("spillway_lane_oldest_age_seconds", "Age of a lane's oldest entry.", ("lane",))
PENDING = Gauge("spillway_lane_pending", "Leases of a lane that are running.", ("lane",))
QUEUED = Gauge("spillway_lane_queued", "Jobs of a lane that are at no worker.", ("lane",))
STRANDED = Gauge(
    "spillway_lane_stranded", "Leases of a lane whose worker has no heartbeat any more.", ("lane",)
)
WORKERS = Gauge("spillway_workers", "Workers of a family that live and take work.", ("family",))
DEAD_LETTERS = Gauge("spillway_dead_letters", "Dead letters kept, by family.", ("family",))
PLANNED_COST_RATIO = Gauge(
    "spillway_planned_cost_ratio",
    "Seconds of the planned batch of a kind by the workers' cost models now, over the plan's.",
    ("kind",),
)
CONNECTIONS = Gauge("spillway_router_connections", "Open client connections.")
TEXT_RESTARTS = Counter(
    "spillway_text_pool_restarts", "Times the pool of text processes was replaced."
)
BUS_DOWN = Gauge(
    "spillway_bus_down_seconds", "Seconds since Redis was last reached; 0 while it is."
)
BUS_MEMORY = Gauge("spillway_bus_memory_bytes", "Memory Redis uses; of a Cluster the fullest node.")
BUS_LIMIT = Gauge("spillway_bus_memory_limit_bytes", "Its maxmemory; 0 where it has none.")
FIRST_TOKEN = Histogram(
    "spillway_time_to_first_token_seconds",
    "From a generation's request to its first token, as its client's router sees it.",
    ("model",),
    buckets=SHORT_S,
)
PER_TOKEN = Histogram(
    "spillway_time_per_output_token_seconds",
    "Mean seconds between the tokens of one choice after its first, as the router sees them.",
    ("model",),
    buckets=PER_TOKEN_S,
)
STREAMS = Gauge("spillway_router_streams", "Open streams of generations.")


# Finding a series by its labels takes longer than counting.


@lru_cache(1024)
def requests(route: str, model: str, status: int) -> Counter:
    """Return the counter of requests of a route and model that were answered with a status."""
    return REQUESTS.labels(route, model, str(status))


@lru_cache(1024)
def duration(route: str, model: str) -> Histogram:
    """Return the histogram of the seconds of requests of a route and model."""
    return DURATION.labels(route, model)


@lru_cache(1024)
def admitted(lane: str) -> Counter:
    """Return the counter of the jobs that a lane has taken."""
    return ADMITTED.labels(lane)
