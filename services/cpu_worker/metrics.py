"""What cpu_worker measures: an embedding worker's metrics on the cpu lane."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from common.work.metrics import WorkMetrics


def declare(registry: CollectorRegistry = REGISTRY) -> WorkMetrics:
    """Declare this service's metrics; once per registry."""
    return WorkMetrics("cpu", registry)
