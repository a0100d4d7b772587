"""What a generator measures beside its steps, which are counted as the batches of its lane."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from common.work.metrics import WorkMetrics
from services.gpu_worker.decide.scheduler import Scheduler
from services.gpu_worker.steps import Ran

LANE = "gpu"


class EngineMetrics:
    """Pages and sequences of one generator; `work` has its steps and tokens."""

    def __init__(self, work: WorkMetrics, registry: CollectorRegistry = REGISTRY) -> None:
        self.work = work
        self._preempted = 0
        pages = Gauge(
            "spillway_pages", "Pages by tier and state.", ("tier", "state"), registry=registry
        )
        self.pages_used = pages.labels("device", "used")
        self.pages_cached = pages.labels("device", "cached")
        self.pages_free = pages.labels("device", "free")
        self.page_bytes = Gauge(
            "spillway_page_bytes",
            "Bytes of all pages of a tier, used, cached and free.",
            ("tier",),
            registry=registry,
        ).labels("device")
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
