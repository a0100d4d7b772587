"""The metrics of an embedding worker; the service declares them once, under its lane."""

from __future__ import annotations

import copy

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import ATTEMPTS, DURATION_S, ITEMS, SHORT_S, TOKENS

_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4)


class WorkMetrics:
    """Batches, jobs by outcome, and how well step times were predicted."""

    def __init__(self, lane: str, registry: CollectorRegistry = REGISTRY) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("lane",), buckets=buckets, registry=registry)

        self._batch_size = histogram(
            "spillway_batch_size", "Texts per batch, sequences per step.", ITEMS
        )
        self._batch_tokens = histogram("spillway_batch_tokens", "Tokens per batch.", TOKENS)
        self._batch_wait = histogram(
            "spillway_batch_wait_seconds", "From reading a job to the start of its batch.", SHORT_S
        )
        self._step = histogram(
            "spillway_step_seconds", "Seconds the device took for a batch.", DURATION_S
        )
        self._step_ratio = histogram(
            "spillway_step_measured_ratio", "Measured over predicted seconds of a batch.", _RATIO
        )
        self._attempts = histogram(
            "spillway_job_attempts",
            "Deliveries of a job so far, counted when it is read.",
            ATTEMPTS,
        )
        self._isolated = Counter(
            "spillway_batches_isolated_total",
            "Batches that raised and were run job by job.",
            ("lane",),
            registry=registry,
        )
        self._jobs = Counter(
            "spillway_jobs_total", "Jobs ended here.", ("lane", "outcome"), registry=registry
        )
        self._depth = Gauge(
            "spillway_worker_depth",
            "What this worker may hold and keep its deadline.",
            ("lane", "unit"),
            registry=registry,
        )
        self._use(lane)

    def _use(self, lane: str) -> None:
        self._lane = lane
        self.batch_size = self._batch_size.labels(lane)
        self.batch_tokens = self._batch_tokens.labels(lane)
        self.batch_wait = self._batch_wait.labels(lane)
        self.step = self._step.labels(lane)
        self.step_ratio = self._step_ratio.labels(lane)
        self.attempts = self._attempts.labels(lane)
        self.isolated = self._isolated.labels(lane)
        self.depth_items = self._depth.labels(lane, "items")
        self.depth_tokens = self._depth.labels(lane, "tokens")

    def on(self, lane: str) -> WorkMetrics:
        """Return the same metrics under another lane's label."""
        other = copy.copy(self)
        other._use(lane)
        return other

    def ended(self, outcome: str) -> None:
        """Count one job by outcome: ok, error, expired, cancelled, fenced, dead."""
        self._jobs.labels(self._lane, outcome).inc()
