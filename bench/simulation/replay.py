"""Replay a trace of arrivals through the admission policies on a virtual clock, with the product's own decisions.

What is simulated is time: a device takes what its cost says, and longer while its trace of speeds says so. A
`clairvoyant` knows these speeds beforehand and admits in the order of arrival; what no policy can exceed is
`bound.most_tokens`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from bench.simulation.speed import FULL_SPEED, SpeedTrace
from common.cost.finish import LEAST, Queue, Tail, place, remaining
from common.cost.linear import LinearCost, Probe
from common.cost.slowdown import slowdown
from engine.encoder.batching import next_batch
from engine.encoder.capacity import EncoderCapacity

Policy = Literal["windve-tokens", "windve", "accelerator-only", "round-robin", "clairvoyant"]
POLICIES: tuple[Policy, ...] = (
    "clairvoyant",
    "windve-tokens",
    "windve",
    "accelerator-only",
    "round-robin",
)
SPARE = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)  # of the objective, what clairvoyants keep in hand
_PROBES = ((1, 8), (1, 64), (8, 256), (8, 1024), (32, 2048))


class Arrival(NamedTuple):
    """A request of `items` texts and `tokens` tokens that comes at `at_s` and must have ended `within_s` later."""

    at_s: float
    items: int
    tokens: int
    within_s: float


class Device(NamedTuple):
    """What a lane's one worker runs on: its cost at full speed, and its speed over time."""

    cost: LinearCost
    speed: SpeedTrace = FULL_SPEED

    def end(self, start_s: float, items: int, tokens: int) -> float:
        """Return when a batch that begins at `start_s` is over."""
        return self.speed.end(start_s, self.cost.seconds(items, tokens))


@dataclass
class Replayed:
    """What became of a trace: requests by lane, tokens that ended in time, and how many ended late."""

    offered: int = 0
    refused: int = 0
    admitted: list[int] = field(default_factory=list)
    tokens: int = 0
    missed: int = 0

    @property
    def miss_ratio(self) -> float:
        """Late ones of those admitted."""
        return self.missed / max(1, sum(self.admitted))


@dataclass(eq=False)
class _Job:
    items: int
    tokens: int
    due_s: float
    batch: int = 0
    finish_s: float = 0.0
    admitted_s: float = 0.0
    alone: bool = False

    @property
    def due_ms(self) -> int:
        return math.ceil(1000 * self.due_s)


class _Lane:
    def __init__(self, device: Device, slo_s: float, *, knows: bool) -> None:
        self.device, self._knows = device, knows
        probes = [Probe(i, t, device.cost.seconds(i, t)) for i, t in _PROBES]
        self.pace = EncoderCapacity(probes, slo_s=slo_s, known=device.cost if knows else None)
        self.queue: list[_Job] = []
        self.running: list[_Job] = []
        self.began_s = self.until_s = self.told_s = 0.0
        self.began = 0
        self.tail = Tail()
        self.depth = device.cost.queries(slo_s)

    @property
    def held(self) -> list[_Job]:
        return self.running + self.queue

    def slowdown(self, others: Sequence[_Lane], now: float) -> float:
        """Return the factor by which batches take longer now, as admission computes it."""
        own, *rest = (lane.pace.slowness.faded(now - lane.told_s) for lane in (self, *others))
        return slowdown(own, rest)

    def seen(self, others: Sequence[_Lane], now: float, hop_s: float) -> Queue:
        """Return the lane as admission sees it, beside the other lanes of its machine."""
        cost = self.pace.cost.scaled(1.0 if self._knows else self.slowdown(others, now))
        late = [lane.pace.late for lane in (self, *others)]
        late_s, late_share = (0.0, 0.0) if self._knows else map(max, zip(*late, strict=True))
        running = _size(self.running)
        left_s = remaining(self.told_s - now, cost.seconds(*running)) if self.running else 0.0
        return Queue(
            cost, 1, *_size(self.held), *running, left_s, self.began, *self.pace.limits,
            hop_s, late_s, late_share, LEAST * self.pace.slo_s,
        )  # fmt: skip

    def take(self, queue: list[_Job], now: float) -> list[_Job]:
        """Return the batch the worker would form of `queue`."""

        def end_ms(items: int, tokens: int) -> float:
            if self._knows:
                return 1000 * self.device.end(now, items, tokens)
            return 1000 * (now + self.pace.surely(items, tokens))

        return [queue[index] for index in next_batch(queue, self.pace.limits, end_ms)]

    def in_time(self, queue: list[_Job], now: float, spare_s: float) -> bool:
        """Whether everything in `queue` would end `spare_s` before its deadline: only a clairvoyant knows."""
        at = max(now, self.until_s) if self.running else now
        while queue:
            batch = set(self.take(queue, at))
            queue = [job for job in queue if job not in batch]
            at = self.device.end(at, *_size(batch))
            if at + spare_s > min(job.due_s for job in batch):
                return False
        return True


class Replay:
    """The admission policy of one or two lanes, accelerator first."""

    def __init__(
        self,
        devices: Sequence[Device],
        policy: Policy,
        *,
        slo_s: float,
        hop_s: float = 0.0,
        spare_s: float = 0.0,
    ) -> None:
        """A clairvoyant admits what it knows to end `spare_s` before its deadline; others ignore `spare_s`."""
        self._policy: Policy = policy
        self._hop_s, self._spare_s = hop_s, spare_s
        used = devices[:1] if policy == "accelerator-only" else devices
        knows = policy == "clairvoyant"
        self._lanes = [_Lane(device, slo_s, knows=knows) for device in used]
        self._turn = 0
        self.result = Replayed(admitted=[0] * len(devices))

    def run(self, arrivals: Sequence[Arrival]) -> Replayed:
        """Replay a trace to its end."""
        events: list[tuple[float, int, int]] = [(a.at_s, 0, i) for i, a in enumerate(arrivals)]
        heapq.heapify(events)
        while events:
            now, is_end, index = heapq.heappop(events)
            if is_end:
                self._end(self._lanes[index], now)
                number = index
            else:
                found = self._arrive(arrivals[index], now)
                if found is None or self._lanes[found].running:
                    continue
                number = found
            if self._begin(self._lanes[number], now):
                heapq.heappush(events, (self._lanes[number].until_s, 1, number))
        return self.result

    def _arrive(self, arrival: Arrival, now: float) -> int | None:
        self.result.offered += 1
        order = list(range(len(self._lanes)))
        if self._policy == "round-robin":
            self._turn += 1
            order = [(self._turn + i) % len(order) for i in order]
        for index in order:
            lane = self._lanes[index]
            job = _Job(arrival.items, arrival.tokens, now + arrival.within_s, admitted_s=now)
            if self._admits(lane, job, now):
                lane.queue.append(job)
                self.result.admitted[index] += 1
                return index
        self.result.refused += 1
        return None

    def _admits(self, lane: _Lane, job: _Job, now: float) -> bool:
        if self._policy not in ("windve-tokens", "clairvoyant"):
            return _size(lane.held)[0] + job.items <= lane.depth
        queue = lane.seen([each for each in self._lanes if each is not lane], now, self._hop_s)
        tail = lane.tail._replace(due_s=lane.tail.due_s - now)
        spot = place(queue, tail, job.items, job.tokens, job.due_s - now)
        job.batch, job.finish_s = spot.number, now + spot.finish_s
        if self._policy == "windve-tokens":
            good = queue.safe(spot.finish_s) <= job.due_s - now
        else:
            spare_s = self._hop_s + self._spare_s
            good = lane.in_time([*lane.queue, job], now, spare_s)
            if not good:
                job.batch = lane.tail.number + 1
                spot = spot._replace(tail=Tail(job.batch, job.items, job.tokens, math.inf))
                good = lane.in_time([*lane.queue, job], now, spare_s)
        if good:
            lane.tail = spot.tail._replace(due_s=spot.tail.due_s + now)
        return good

    def _begin(self, lane: _Lane, now: float) -> bool:
        lane.running = lane.take(lane.queue, now) if lane.queue else []
        if not lane.running:
            return False
        begun = set(lane.running)
        lane.queue = [job for job in lane.queue if job not in begun]
        size = _size(lane.running)
        lane.pace.rested(now - lane.until_s)
        lane.began_s, lane.told_s = now, now + lane.pace.expected(*size)
        lane.until_s = lane.device.end(now, *size)
        lane.began = max(lane.began, *(job.batch for job in lane.running))
        return True

    def _end(self, lane: _Lane, now: float) -> None:
        size = _size(lane.running)
        lane.pace.ran(*size, now - lane.began_s)
        last = max(lane.running, key=lambda job: job.finish_s)
        if last.finish_s:
            lane.pace.ended(now - last.finish_s, last.finish_s - last.admitted_s)
        for job in lane.running:
            late = now + self._hop_s > job.due_s + 1e-9
            self.result.missed += late
            self.result.tokens += 0 if late else job.tokens
        lane.running = []


def _size(jobs: Collection[_Job]) -> tuple[int, int]:
    return sum(job.items for job in jobs), sum(job.tokens for job in jobs)


def texts(
    times: Iterator[float],
    rng: random.Random,
    *,
    seconds: float,
    within_s: float,
    tokens: tuple[int, int] = (20, 500),
) -> list[Arrival]:
    """Return single texts of random length at `times`, as far as they lie within `seconds`."""
    within = itertools.takewhile(lambda at: at < seconds, times)
    return [Arrival(at, 1, rng.randint(*tokens), within_s) for at in within]


def clairvoyant(
    arrivals: Sequence[Arrival], devices: Sequence[Device], *, slo_s: float, hop_s: float = 0.0
) -> Replayed:
    """Replay the trace with clairvoyants that keep different spare times; return the best one's result.

    One that fills every batch to the last moment takes long batches of old texts, and younger texts are refused.
    """
    runs = (
        Replay(devices, "clairvoyant", slo_s=slo_s, hop_s=hop_s, spare_s=part * slo_s).run(arrivals)
        for part in SPARE
    )
    return max(runs, key=lambda done: done.tokens)
