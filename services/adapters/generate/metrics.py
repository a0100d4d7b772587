"""The metrics of a generator, except for its steps, which are counted as batches of its lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from engine.decoder.executor.interface import PassageCounts
from engine.decoder.executor.step import StepResult
from services.adapters.generate.home_metrics import HomeMetrics
from services.adapters.metrics import LaneMetrics

if TYPE_CHECKING:
    from engine.decoder.engine import DecoderEngine
    from engine.decoder.kv.offload import OffloadManager

LANE = "gpu"


class TierMetrics:
    """The metrics of one generator's page tiers: counters that follow the engine's counts of benefits and costs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._found = counter(
            "spillway_pages_found",
            "Pages that sequences needed, by the tier they were found in; computed: in none.",
            "tier",
        )
        self._moved_bytes = counter(
            "spillway_page_move_bytes", "Bytes of pages moved between tiers.", "move"
        )
        self._moved_s = counter(
            "spillway_page_move_seconds", "Seconds that moving pages took.", "move"
        )
        self._fetch_s = counter(
            "spillway_page_fetch_seconds",
            "Seconds of fetches from a tier below the host: as they were predicted, and measured.",
            "tier",
            "kind",
        )
        self._saved_s = counter(
            "spillway_recompute_saved_seconds",
            "Predicted seconds of computing that pages found have saved.",
        )
        self._unsound = counter(
            "spillway_unsound_pages",
            "Pages that were not what was kept, and were computed.",
            "tier",
        )
        self._last: dict[tuple[Any, ...], float] = {}
        for tier in ("device", "host", "redis", "disk", "computed"):
            self._found.labels(tier)
        for move in ("load", "save", "get", "put"):
            self._moved_bytes.labels(move)
            self._moved_s.labels(move)
        for tier in ("redis", "disk"):
            for kind in ("predicted", "measured"):
                self._fetch_s.labels(tier, kind)
        for tier in ("host", "redis"):
            self._unsound.labels(tier)

    def observe(self, offload: OffloadManager) -> None:
        """Add the engine's counts since the last call."""
        tiers, copier, prefetcher = offload.tiers, offload.copier, offload.prefetcher
        for tier, count in tiers.found.items():
            self._rise(self._found, count, tier)
        self._rise(self._saved_s, tiers.saved_s)
        self._rise(self._unsound, tiers.corrupt, "host")
        if copier is not None:
            for move, size in copier.moved_bytes.items():
                self._rise(self._moved_bytes, size, move)
                self._rise(self._moved_s, copier.moved_s[move], move)
        if prefetcher is not None:
            self._rise(self._unsound, prefetcher.corrupt, "redis")
            for below, breaker in prefetcher.breakers.items():
                self._rise(self._fetch_s, breaker.expected_s, below, "predicted")
                self._rise(self._fetch_s, breaker.took_s, below, "measured")

    def _rise(self, metric: Counter, to: float, *labels: str) -> None:
        key = (metric, *labels)
        child = metric.labels(*labels) if labels else metric
        child.inc(max(0.0, to - self._last.get(key, 0.0)))
        self._last[key] = to


class PassageMetrics:
    """The metrics of one generator's store of passages that were computed alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._looked = Counter(
            "spillway_precomputed_passages_total",
            "Passages computed alone that prompts needed, by whether they were found in the store.",
            ("outcome",),
            registry=registry,
        )
        self._evicted = Counter(
            "spillway_precomputed_passages_evicted_total",
            "Passages computed alone that the store dropped for others.",
            registry=registry,
        )
        self._bytes = Gauge(
            "spillway_precomputed_passage_bytes",
            "Bytes of the host's memory that passages computed alone take.",
            registry=registry,
        )
        self._last = {"hit": 0, "miss": 0, "evicted": 0}
        for outcome in ("hit", "miss"):
            self._looked.labels(outcome)

    def observe(self, passages: PassageCounts) -> None:
        """Add the counts since the last call."""
        now = {"hit": passages.hits, "miss": passages.misses, "evicted": passages.evicted}
        for outcome in ("hit", "miss"):
            self._looked.labels(outcome).inc(now[outcome] - self._last[outcome])
        self._evicted.inc(now["evicted"] - self._last["evicted"])
        self._last = now
        self._bytes.set(passages.bytes)


class EngineMetrics:
    """The metrics of one generator's pages and sequences; `work` has those of its steps and tokens."""

    def __init__(self, work: LaneMetrics, registry: CollectorRegistry = REGISTRY) -> None:
        self.work = work
        self._preempted = 0
        self._pages = Gauge(
            "spillway_pages", "Pages by tier and state.", ("tier", "state"), registry=registry
        )
        self.page_bytes = Gauge(
            "spillway_page_bytes",
            "Bytes of all pages of a tier, used, cached and free.",
            ("tier",),
            registry=registry,
        )
        self.tiers = TierMetrics(registry)
        self.homes = HomeMetrics(registry)
        self.passages = PassageMetrics(registry)
        self.running = Gauge(
            "spillway_running_sequences", "Sequences that hold pages.", registry=registry
        )
        self.waiting = Gauge(
            "spillway_waiting_sequences", "Sequences read that have no pages.", registry=registry
        )
        self.paused = Gauge(
            "spillway_paused_sequences",
            "Sequences that get no tokens: they are paused, or wait for an extension of their prompt.",
            registry=registry,
        )
        self.preemptions = Counter(
            "spillway_preemptions",
            "Sequences that lost their pages to earlier ones and are recomputed.",
            registry=registry,
        )
        self.structured = Counter(
            "spillway_structured_answers_total",
            "Answers bound by a grammar, by their end: stop is whole, length was cut off by max_tokens.",
            ("finish",),
            registry=registry,
        )
        for finish in ("stop", "length"):
            self.structured.labels(finish)
        self.extensions = Counter(
            "spillway_prompt_extensions_total",
            "Extensions that running generations took, by what became of the prompt.",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("changed", "unchanged", "refused"):
            self.extensions.labels(outcome)
        self.extension_tokens = Counter(
            "spillway_prompt_extension_tokens_total",
            "Tokens of generations whose prompt was extended, by whether they are computed again.",
            ("how",),
            registry=registry,
        )
        for how in ("computed", "kept"):
            self.extension_tokens.labels(how)
        self.extension_wait = Histogram(
            "spillway_prompt_extension_wait_seconds",
            "Seconds that a generation waited at a boundary for the extension of its prompt.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            registry=registry,
        )
        self._guessed = Counter(
            "spillway_guessed_tokens_total",
            "Tokens that were guessed from the sequence and computed ahead, by whether the model drew them.",
            ("guess",),
            registry=registry,
        )
        self._last_guessed = {"right": 0, "wrong": 0}
        for guess in self._last_guessed:
            self._guessed.labels(guess)
        self.unacknowledged = Gauge(
            "spillway_tokens_unacknowledged",
            "Tokens of a sequence that the bus has not acknowledged yet.",
            registry=registry,
        )

    def observe_step(
        self, ran: StepResult, predicted_s: float, *, sequences: int, rows: int
    ) -> None:
        """Record one step by its seconds per token; `predicted_s` is the prediction for one token."""
        token_s = ran.seconds / ran.tokens
        self.work.batch_size.observe(sequences)
        self.work.batch_tokens.observe(rows)
        self.work.step.observe(token_s)
        if ran.isolated:
            self.work.isolated.inc()
        else:
            self.work.step_ratio.observe(token_s / max(predicted_s, 1e-9))

    def observe_state(self, engine: DecoderEngine, unacknowledged: int) -> None:
        """Record the scheduler's sequences and pages, and how many tokens the loop is ahead of the bus."""
        scheduler, tiers = engine.scheduler, engine.offload.tiers
        for tier, pools in (("device", tiers.device), ("host", tiers.host)):
            for state in ("used", "cached", "free"):
                count = sum(getattr(pool, state) for pool in pools)
                self._pages.labels(tier, state).set(count)
        self.running.set(len(scheduler.running))
        self.waiting.set(len(scheduler.waiting))
        self.paused.set(len(scheduler.paused))
        self.unacknowledged.set(unacknowledged)
        self.preemptions.inc(scheduler.preemptions - self._preempted)
        self._preempted = scheduler.preemptions
        guessed = {"right": engine.accepted, "wrong": engine.drafted - engine.accepted}
        for guess, count in guessed.items():
            self._guessed.labels(guess).inc(count - self._last_guessed[guess])
        self._last_guessed = guessed
        self.tiers.observe(engine.offload)
        if engine.executor.passages is not None:
            self.passages.observe(engine.executor.passages)
        if engine.homes is not None:
            self.homes.observe(engine.homes)
