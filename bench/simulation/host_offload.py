"""Run NEO's scheduler under a virtual clock: a step takes what rooflines say, and pages are counted, not kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.cost.linear import LinearCost
from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier
from engine.decoder.offload.costs import Attention, OffloadCosts, OffloadProfile
from engine.decoder.offload.plan import (
    DecodeState,
    OffloadLimits,
    OffloadMode,
    OffloadPlan,
    OffloadState,
    PoolState,
    PromptState,
    StageTimes,
    SubBatch,
    pages_of,
)
from engine.decoder.offload.scheduler import schedule

SHOWN = 48  # prompts that a step may begin: the scheduler sees no more of the queue


class OffloadRequest(NamedTuple):
    """A request that comes at `at_s`: tokens of its prompt and of its answer, at least one each."""

    at_s: float
    prompt: int
    output: int


@dataclass(eq=False)
class _Running:
    order: int
    request: OffloadRequest
    produced: int = 0
    computed: int = 0
    home: LocalTier = "device"
    pages: int = 0
    skipped: int = 0
    settled: int = 0

    @property
    def length(self) -> int:
        return self.request.prompt + self.produced

    @property
    def decodes(self) -> bool:
        return self.computed == self.length - 1 and self.produced > 0

    @property
    def prompt(self) -> PromptState:
        running = self.computed > 0
        return PromptState(self.order, ((self.computed, self.length),), self.pages, running)

    @property
    def decode(self) -> DecodeState:
        return DecodeState(
            self.order, self.home, self.length, self.pages,
            skipped=self.skipped, settled=self.settled,
        )  # fmt: skip


@dataclass
class OffloadRun:
    """What became of all requests: seconds in all, tokens, and seconds per token of each answer."""

    seconds: float = 0.0
    tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)
    on_host: int = 0  # decode rows attended on the host
    decoded: int = 0
    preempted: int = 0
    moved: int = 0
    longest_skip: int = 0

    @property
    def throughput(self) -> float:
        """Tokens a second, prompts' among them."""
        return self.tokens / self.seconds

    @property
    def host_share(self) -> float:
        """The share of decode rows attended on the host."""
        return self.on_host / max(1, self.decoded)


class OffloadSimulation:
    """Requests served in one mode by a device and a host that hold so many tokens of keys and values."""

    def __init__(
        self,
        requests: Iterable[OffloadRequest],
        limits: OffloadLimits,
        costs: OffloadCosts,
        tokens: tuple[int, int],
        mode: OffloadMode,
        *,
        profile: OffloadProfile | None = None,
        learns: bool = False,
    ) -> None:
        """`costs` are what stages take, `tokens` what the device and the host can hold.

        Steps are planned by the costs of `profile`, if there is one (modes `device` and `asymmetric` only), which
        `learns` from every stage.
        """
        self.limits, self.costs, self.mode = limits, costs, mode
        self._profile, self._learns = profile, learns
        self._lines: dict[Attention, LinearCost] = {
            "device": costs.device,
            "host": costs.host,
            "prefill": costs.prefill,
            "exchange": costs.exchange,
        }
        self.now_s = 0.0
        self.served = OffloadRun()
        self._due = [_Running(order, each) for order, each in enumerate(sorted(requests))]
        self._due.reverse()
        self._open: dict[int, _Running] = {}
        self._total: dict[LocalTier, int] = {"device": tokens[0] // PAGE, "host": tokens[1] // PAGE}

    def run(self) -> OffloadRun:
        """Serve all requests."""
        while self._due or self._open:
            while self._due and (self._due[-1].request.at_s <= self.now_s or not self._open):
                first = self._due.pop()
                self.now_s = max(self.now_s, first.request.at_s)
                self._open[first.order] = first
            costs = self._profile.costs if self._profile else self.costs
            plan = schedule(self._state(), self.limits, costs, self.mode)
            self.now_s += self._took_s(plan) if self._profile else plan.seconds
            self._apply(plan)
        self.served.seconds = self.now_s
        return self.served

    def _state(self) -> OffloadState:
        each = [self._open[order] for order in sorted(self._open)]
        used: Counter[LocalTier] = Counter()
        for one in each:
            used[one.home] += one.pages
        pools = {tier: PoolState(total, total - used[tier]) for tier, total in self._total.items()}
        assert min(pool.free for pool in pools.values()) >= 0
        prompts = [one for one in each if not one.decodes]
        shown = [one for one in prompts if one.computed]
        shown += [one for one in prompts if not one.computed][:SHOWN]
        return OffloadState(
            tuple(one.prompt for one in sorted(shown, key=lambda one: one.order)),
            tuple(one.decode for one in each if one.decodes),
            pools["device"],
            pools["host"],
        )

    def _took_s(self, plan: OffloadPlan) -> float:
        """Return what a planned step takes by the true costs, and let the profile learn."""
        costs = self.costs
        sizes = [self._sizes(batch) for batch in plan.batches]
        took = [self._stages(*size) for size in sizes] + [(0.0, 0.0, 0.0)] * (2 - len(sizes))
        (linear_0, device_0, host_0), (linear_1, device_1, host_1) = took[:2]
        times = StageTimes((linear_0, linear_1), (device_0, device_1), (host_0, host_1))
        if self._profile and self._learns:
            for batch, size in zip(plan.batches, sizes, strict=True):
                self._profile.linear_took(batch.rows, costs.linear.seconds(batch.rows))
                for stage, (items, tokens) in size[1].items():
                    if items:
                        seconds = self._lines[stage].seconds(items, tokens)
                        self._profile.attention_took(stage, items, tokens, seconds)
        copied = sum(move.pages for move in plan.moves)
        copied += sum(chunk.copied for batch in plan.batches for chunk in batch.prompts)
        staged_s = costs.step_s + max(costs.layers * times.layer_s, costs.page_s * copied)
        if not plan.whole:
            return staged_s
        attended = sizes[0][1]["device"]
        took_s = costs.whole_s(*attended, staged_s)
        if self._profile and self._learns:
            self._profile.whole_took(*attended, took_s)
        return took_s

    def _sizes(self, batch: SubBatch) -> tuple[int, dict[Attention, tuple[int, int]]]:
        """Return the rows of a batch, and items and tokens of its attention stages."""
        host = [self._open[order].length for order in batch.host]
        device = [self._open[order].length for order in batch.device]
        pairs = sum(self._open[chunk.order].prompt.pairs(chunk.rows) for chunk in batch.prompts)
        return batch.rows, {
            "device": (len(device), sum(device)),
            "prefill": (len(batch.prompts), pairs),
            "host": (len(host), sum(host)),
            "exchange": (len(host), 0),
        }

    def _stages(
        self, rows: int, sizes: dict[Attention, tuple[int, int]]
    ) -> tuple[float, float, float]:
        """Return what one layer's linear work, attention on the device and on the host take."""
        took = {s: self._lines[s].seconds(*size) if size[0] else 0.0 for s, size in sizes.items()}
        linear_s = self.costs.linear.seconds(rows)
        return linear_s, took["device"] + took["prefill"], took["host"] + took["exchange"]

    def _apply(self, plan: OffloadPlan) -> None:
        assert plan.batches or plan.preempt, "a step computes something"
        served = self.served
        for order in plan.preempt:
            one = self._open[order]
            one.computed = one.pages = one.skipped = 0
            one.home = "device"
            served.preempted += 1
        for one in self._open.values():
            one.settled += 1
            one.skipped += one.decodes
        for move in plan.moves:
            self._open[move.order].home, self._open[move.order].settled = move.to, 0
            served.moved += 1
        served.choices[plan.why] += 1
        for batch in plan.batches:
            for chunk in batch.prompts:
                one = self._open[chunk.order]
                one.home, one.computed, one.settled = chunk.home, one.computed + chunk.rows, 0
                one.pages = pages_of(one.computed)
                if chunk.finishes:
                    self._token(one)
            for order in (*batch.device, *batch.host):
                one = self._open[order]
                served.longest_skip = max(served.longest_skip, one.skipped - 1)
                one.computed, one.skipped, one.pages = one.length, 0, pages_of(one.length)
                self._token(one)
            served.decoded += len(batch.device) + len(batch.host)
            served.on_host += len(batch.host)

    def _token(self, one: _Running) -> None:
        one.produced += 1
        if one.produced >= one.request.output:
            del self._open[one.order]
            self.served.tokens += one.length
            self.served.latencies_s.append((self.now_s - one.request.at_s) / one.produced)


def synthetic(count: int, prompt: int, output: int, seed: int) -> list[OffloadRequest]:
    """Return requests that are all there at once, lengths uniform within a tenth of the mean (NEO, 5.1)."""
    draw = random.Random(seed)
    return [
        OffloadRequest(
            0.0, int(draw.uniform(0.9, 1.1) * prompt), max(1, int(draw.uniform(0.9, 1.1) * output))
        )
        for _ in range(count)
    ]


def arriving(
    count: int, rate: float, lengths: tuple[float, float], seed: int, *, longest: int = 8000
) -> list[OffloadRequest]:
    """Return requests that arrive at random, `rate` a second; lengths are lognormal around the medians given."""
    draw = random.Random(seed)
    found, now_s = [], 0.0
    for _ in range(count):
        now_s += draw.expovariate(rate)
        prompt, output = (max(1, int(each * draw.lognormvariate(0, 0.6))) for each in lengths)
        prompt = min(prompt, longest - 1)
        found.append(OffloadRequest(now_s, prompt, min(output, longest - prompt)))
    return found
