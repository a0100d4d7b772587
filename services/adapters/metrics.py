"""Metrics of batches and steps, declared once in a process, and labelled by lane and model for each of its loops."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import DURATION_S, ITEMS, SHORT_S, TOKENS
from common.wire.registry import WorkerRecord
from engine.device import TaskTimes

_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4)


@dataclass(frozen=True, slots=True)
class LaneMetrics:
    """The metrics of one lane and one model; `depth`, `cost` and `explained` have values once a record is published."""

    lane: str
    missed: Counter
    batch_size: Histogram
    batch_tokens: Histogram
    batch_wait: Histogram
    step: Histogram
    step_ratio: Histogram
    isolated: Counter
    depth_items: Gauge
    depth_tokens: Gauge
    depth: Gauge
    cost: Gauge
    explained: Gauge
    input: Counter
    cached: Counter
    output: Counter

    def publish(self, record: WorkerRecord) -> None:
        """Set the metrics of a worker's depths and costs from its record."""
        self.depth_items.set(record.depth_items)
        self.depth_tokens.set(record.depth_tokens)
        self.depth.labels(self.lane, "queries").set(record.depth_queries)
        self.cost.labels(self.lane, "beta").set(record.beta_s)
        self.cost.labels(self.lane, "alpha_items").set(record.alpha_items_s)
        self.cost.labels(self.lane, "alpha_tokens").set(record.alpha_tokens_s)
        self.cost.labels(self.lane, "late").set(record.late_s)
        self.explained.labels(self.lane).set(record.r2)


class WorkMetrics:
    """The metrics of one process: batches, tokens, costs, and the accuracy of predicted batch seconds."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
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
            "spillway_step_seconds", "Seconds the device took for a batch or step.", DURATION_S
        )
        self._step_ratio = histogram(
            "spillway_step_measured_ratio", "Measured over predicted seconds of a batch.", _RATIO
        )
        self._isolated = Counter(
            "spillway_batches_isolated_total",
            "Batches that raised and were run job by job.",
            ("lane",),
            registry=registry,
        )
        self._tokens = Counter(
            "spillway_tokens_total",
            "Tokens of texts and prompts computed (input) or found computed (cached), and generated (output).",
            ("model", "kind"),
            registry=registry,
        )
        self._missed = Counter(
            "spillway_due_missed_total",
            "Jobs that ended after they were due: their own deadline, or the lane's objective.",
            ("lane",),
            registry=registry,
        )
        self._device_wait = Histogram(
            "spillway_device_wait_seconds",
            "How long other kinds of tasks kept a task from the device.",
            ("kind",),
            buckets=SHORT_S,
            registry=registry,
        )
        self._device_busy = Counter(
            "spillway_device_busy_seconds_total",
            "Seconds in which the device ran tasks.",
            ("kind",),
            registry=registry,
        )
        self._device_idle = Counter(
            "spillway_device_idle_seconds_total",
            "Seconds in which the device's thread ran no task, counted when the next one begins.",
            registry=registry,
        )
        self._device: dict[str, tuple[Histogram, Counter]] = {}  # by kind, since `labels` is slow
        self._cost = Gauge(
            "spillway_cost_seconds",
            "What a batch costs: beta, alpha_items and alpha_tokens each, and the margin for being late.",
            ("lane", "part"),
            registry=registry,
        )
        self._explained = Gauge(
            "spillway_cost_explained_ratio",
            "Share of the variance of batch seconds that the cost model explains (r squared).",
            ("lane",),
            registry=registry,
        )
        self._depth = Gauge(
            "spillway_worker_depth",
            "What this worker may hold and keep its deadline.",
            ("lane", "unit"),
            registry=registry,
        )

    def device_ended(self, kind: str, times: TaskTimes) -> None:
        """Record the times of a task of this kind that the device has run."""
        self.beside_ended(kind, times)
        self._device_idle.inc(times.idle_s)

    def beside_ended(self, kind: str, times: TaskTimes) -> None:
        """Record the times of a task that a second thread has run beside the device's, which may be idle meanwhile."""
        if kind not in self._device:
            self._device[kind] = self._device_wait.labels(kind), self._device_busy.labels(kind)
        wait, busy = self._device[kind]
        wait.observe(times.waited_s)
        busy.inc(times.took_s)

    def on(self, lane: str, model: str) -> LaneMetrics:
        """Return the metrics with the labels of one lane and one model."""
        return LaneMetrics(
            lane=lane,
            missed=self._missed.labels(lane),
            batch_size=self._batch_size.labels(lane),
            batch_tokens=self._batch_tokens.labels(lane),
            batch_wait=self._batch_wait.labels(lane),
            step=self._step.labels(lane),
            step_ratio=self._step_ratio.labels(lane),
            isolated=self._isolated.labels(lane),
            depth_items=self._depth.labels(lane, "items"),
            depth_tokens=self._depth.labels(lane, "tokens"),
            depth=self._depth,
            cost=self._cost,
            explained=self._explained,
            input=self._tokens.labels(model, "input"),
            cached=self._tokens.labels(model, "cached"),
            output=self._tokens.labels(model, "output"),
        )
