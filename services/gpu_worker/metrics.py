"""What gpu_worker measures: an embedding worker's metrics on the gpu lane, and those of the generator beside it."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import SHORT_S
from common.work.metrics import WorkMetrics
from services.gpu_worker.decide.scheduler import Scheduler
from services.gpu_worker.steps import Ran

LANE = "gpu"
CHAT_LANE = "gpu.chat"
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


def declare(registry: CollectorRegistry = REGISTRY) -> WorkMetrics:
    """Declare this service's metrics; once per registry."""
    return WorkMetrics(LANE, registry)


class EngineMetrics:
    """Tokens, times to them, pages and sequences of one generator; its steps are `work`'s, on its own lane label."""

    def __init__(
        self, model: str, work: WorkMetrics, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self.work = work.on(CHAT_LANE)
        self._preempted = 0
        self.first_token = Histogram(
            "spillway_time_to_first_token_seconds",
            "From admission of a generation to its first token.",
            ("model",),
            buckets=SHORT_S,
            registry=registry,
        ).labels(model)
        self.per_token = Histogram(
            "spillway_time_per_output_token_seconds",
            "Seconds between a choice's tokens, on average.",
            ("model",),
            buckets=_PER_TOKEN_S,
            registry=registry,
        ).labels(model)
        tokens = Counter(
            "spillway_tokens",
            "Tokens generated, computed of prompts, and found computed.",
            ("model", "kind"),
            registry=registry,
        )
        self.input = tokens.labels(model, "input")
        self.output = tokens.labels(model, "output")
        self.cached = tokens.labels(model, "cached")
        pages = Gauge(
            "spillway_pages", "Pages by tier and state.", ("tier", "state"), registry=registry
        )
        self.pages_used = pages.labels("device", "used")
        self.pages_cached = pages.labels("device", "cached")
        self.pages_free = pages.labels("device", "free")
        self.running = Gauge(
            "spillway_running_sequences", "Sequences that hold pages.", registry=registry
        )
        self.waiting = Gauge(
            "spillway_waiting_sequences", "Sequences read that have no pages.", registry=registry
        )
        self.preemptions = Counter(
            "spillway_preemptions",
            "Sequences that lost their pages to earlier ones and are recomputed.",
            registry=registry,
        )
        self.unacknowledged = Gauge(
            "spillway_steps_unacknowledged",
            "Steps whose tokens the bus has not acknowledged yet.",
            registry=registry,
        )

    def observe_step(self, ran: Ran, predicted_s: float, *, sequences: int, rows: int) -> None:
        """Note one step."""
        self.work.batch_size.observe(sequences)
        self.work.batch_tokens.observe(rows)
        self.work.step.observe(ran.seconds)
        if ran.isolated:
            self.work.isolated.inc()
        else:
            self.work.step_ratio.observe(ran.seconds / max(predicted_s, 1e-9))

    def observe_state(self, scheduler: Scheduler, unacknowledged: int) -> None:
        """Note what the scheduler holds, and how far the loop is ahead of the bus."""
        pools = scheduler.table.pools
        self.pages_used.set(sum(pool.used for pool in pools))
        self.pages_cached.set(sum(pool.cached for pool in pools))
        self.pages_free.set(sum(pool.free for pool in pools))
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.unacknowledged.set(unacknowledged)
        self.preemptions.inc(scheduler.preemptions - self._preempted)
        self._preempted = scheduler.preemptions
