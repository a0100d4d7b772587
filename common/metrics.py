"""Parts common to all services' metrics: bucket boundaries, and the running build."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, disable_created_metrics

# By default each counter has a second series that gives only the time at which its process began.
disable_created_metrics()  # type: ignore[no-untyped-call]

# OpenTelemetry's boundaries for generative AI, so that dashboards can be compared.
DURATION_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
TOKENS = tuple(float(4**power) for power in range(14))
ITEMS = tuple(float(2**power) for power in range(13))
ATTEMPTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)


def version() -> str:
    """Return the installed version, or "unknown" in a tree that is not installed."""
    try:
        return metadata.version("spillway")
    except metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """Return the checkout's commit, or "" where the product does not run from a checkout."""
    git = Path(__file__).resolve().parent.parent / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head
        return (git / head.removeprefix("ref: ")).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def build_info(service: str, registry: CollectorRegistry = REGISTRY) -> Gauge:
    """Declare `spillway_build_info` = 1 with version, commit and service; once per process."""
    gauge = Gauge(
        "spillway_build_info",
        "Which build runs: always 1.",
        ("version", "commit", "service"),
        registry=registry,
    )
    gauge.labels(version(), commit(), service).set(1)
    return gauge
