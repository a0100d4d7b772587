"""Replay a trace of arrivals through the admission policies on a virtual clock, with the product's own decisions.

What is simulated is time: a device takes what its cost says, times a noise drawn beforehand for each of its batches, so
that every policy meets the same device. `clairvoyant` is the bound: it knows the noise of every batch to come.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.cost.finish import Queue, Tail, place
from common.cost.linear import LinearCost, Probe
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
_PROBES = ((1, 8), (1, 64), (8, 256), (8, 1024), (32, 2048))


class Arrival(NamedTuple):
    """A request of `items` texts and `tokens` tokens that comes at `at_s` and must have ended `within_s` later."""

    at_s: float
    items: int
    tokens: int
    within_s: float


class Device(NamedTuple):
    """What a lane's one worker runs on: its cost, and the factor by which a batch takes longer."""

    cost: LinearCost
    noise: Callable[[random.Random], float] = lambda _rng: 1.0


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


@dataclass
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
    def __init__(self, device: Device, slo_s: float, seed: int, *, knows: bool) -> None:
        self.device, self._knows = device, knows
        probes = [Probe(i, t, device.cost.seconds(i, t)) for i, t in _PROBES]
        self.pace = EncoderCapacity(probes, slo_s=slo_s, known=device.cost if knows else None)
        self._rng = random.Random(seed)
        self._noises: list[float] = []
        self.ran = 0
        self.queue: list[_Job] = []
        self.running: list[_Job] = []
        self.until_s = self.told_s = 0.0
        self.began = 0
        self.tail = Tail()
        self.depth = device.cost.queries(slo_s)

    def noise(self, number: int) -> float:
        while len(self._noises) <= number:
            self._noises.append(self.device.noise(self._rng))
        return self._noises[number]

    @property
    def held(self) -> list[_Job]:
        return self.running + self.queue

    def seen(self, now: float, hop_s: float) -> Queue:
        """Return the lane as admission sees it."""
        items, tokens = _size(self.held)
        running = _size(self.running)
        late_s, late_share = (0.0, 0.0) if self._knows else self.pace.late
        return Queue(
            self.pace.cost,
            1,
            items,
            tokens,
            *running,
            max(0.0, self.told_s - now) if self.running else 0.0,
            self.began,
            *self.pace.limits,
            hop_s,
            late_s,
            late_share,
        )

    def take(self, queue: list[_Job], now: float, number: int) -> list[_Job]:
        """Return the batch the worker would form of `queue`."""

        def end_ms(items: int, tokens: int) -> float:
            if self._knows:
                return 1000 * (now + self.device.cost.seconds(items, tokens) * self.noise(number))
            return 1000 * (now + self.pace.surely(items, tokens))

        return [queue[index] for index in next_batch(queue, self.pace.limits, end_ms)]

    def in_time(self, queue: list[_Job], now: float, hop_s: float) -> bool:
        """Whether everything in `queue` would end in time: only a clairvoyant knows."""
        at, number = max(now, self.until_s) if self.running else now, self.ran
        while queue:
            batch = self.take(queue, at, number)
            queue = [job for job in queue if job not in batch]
            at += self.device.cost.seconds(*_size(batch)) * self.noise(number)
            if at + hop_s > min(job.due_s for job in batch):
                return False
            number += 1
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
        seed: int = 0,
    ) -> None:
        self._policy: Policy = policy
        self._hop_s = hop_s
        used = devices[:1] if policy == "accelerator-only" else devices
        knows = policy == "clairvoyant"
        self._lanes = [_Lane(d, slo_s, seed + i, knows=knows) for i, d in enumerate(used)]
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
        queue = lane.seen(now, self._hop_s)
        tail = lane.tail._replace(due_s=lane.tail.due_s - now)
        spot = place(queue, tail, job.items, job.tokens, job.due_s - now)
        job.batch, job.finish_s = spot.number, now + spot.finish_s
        if self._policy == "windve-tokens":
            good = queue.safe(spot.finish_s) <= job.due_s - now
        else:
            good = lane.in_time([*lane.queue, job], now, self._hop_s)
            if not good:
                job.batch = lane.tail.number + 1
                spot = spot._replace(tail=Tail(job.batch, job.items, job.tokens, math.inf))
                good = lane.in_time([*lane.queue, job], now, self._hop_s)
        if good:
            lane.tail = spot.tail._replace(due_s=spot.tail.due_s + now)
        return good

    def _begin(self, lane: _Lane, now: float) -> bool:
        lane.running = lane.take(lane.queue, now, lane.ran) if lane.queue else []
        if not lane.running:
            return False
        lane.queue = [job for job in lane.queue if job not in lane.running]
        size = _size(lane.running)
        lane.told_s = now + lane.pace.cost.seconds(*size)
        lane.until_s = now + lane.device.cost.seconds(*size) * lane.noise(lane.ran)
        lane.ran += 1
        lane.began = max(lane.began, *(job.batch for job in lane.running))
        return True

    def _end(self, lane: _Lane, now: float) -> None:
        size = _size(lane.running)
        took = lane.device.cost.seconds(*size) * lane.noise(lane.ran - 1)
        lane.pace.online.observe(*size, took)
        last = max(lane.running, key=lambda job: job.finish_s)
        if last.finish_s:
            lane.pace.ended(now - last.finish_s, last.finish_s - last.admitted_s)
        for job in lane.running:
            late = now + self._hop_s > job.due_s + 1e-9
            self.result.missed += late
            self.result.tokens += 0 if late else job.tokens
        lane.running = []


def _size(jobs: Sequence[_Job]) -> tuple[int, int]:
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
