"""The router's metrics; every one has a panel or an alert."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from common.metrics import ATTEMPTS, DURATION_S, SHORT_S

REQUESTS = Counter(
    "spillway_requests", "Requests answered, by route and status.", ("route", "model", "status")
)
DURATION = Histogram(
    "spillway_request_duration_seconds",
    "From the request's first byte to the response's last.",
    ("route", "model"),
    buckets=DURATION_S,
)
TOKENS = Counter("spillway_tokens", "Tokens of admitted requests.", ("model", "kind"))
REFUSED = Counter("spillway_refused", "Requests refused at the door.", ("reason",))
ADMITTED = Counter(
    "spillway_admitted", "Jobs admitted, by family and lane class.", ("family", "lane")
)
OUTCOMES = Counter("spillway_jobs", "Jobs ended, by lane and outcome.", ("lane", "outcome"))
JOB_ATTEMPTS = Histogram(
    "spillway_job_attempts",
    "Deliveries a job of several stages needed.",
    ("lane",),
    buckets=ATTEMPTS,
)
DEPTH = Gauge("spillway_lane_depth", "What a lane may hold.", ("lane", "unit"))
USED = Gauge("spillway_lane_used", "What a lane holds, queued and running.", ("lane", "unit"))
OLDEST = Gauge("spillway_lane_oldest_age_seconds", "Age of a lane's oldest entry.", ("lane",))
PENDING = Gauge("spillway_lane_pending", "Leases of a lane that are running.", ("lane",))
CONNECTIONS = Gauge("spillway_router_connections", "Open client connections.")
TEXT_RESTARTS = Gauge(
    "spillway_text_pool_restarts", "Times the pool of text processes was replaced."
)
BUS_DOWN = Gauge(
    "spillway_bus_down_seconds", "Seconds since Redis was last reached; 0 while it is."
)
TTFT = Histogram(
    "spillway_ttft_seconds",
    "From a generation's request to its first token, as the router sees it.",
    ("model",),
    buckets=DURATION_S,
)
TPOT = Histogram(
    "spillway_tpot_seconds",
    "Mean seconds between the tokens of one choice after its first, as the router sees them.",
    ("model",),
    buckets=SHORT_S,
)
STREAMS = Gauge("spillway_router_streams", "Open streams of generations.")
