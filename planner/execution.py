"""Execution of a schedule up to the first token, batch by batch (RAGO, sections 3.6.1 and 3.7.2).

Stages of one group take turns on its chips: of those that have enough requests the deepest begins, so that requests
finish early instead of waiting with others that have just begun; the throughput is the same.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from planner.schedule_search import RagSchedule, SearchSpace, powers

Order = Literal["deepest", "shallowest"]
BatchTime = Callable[[int], float]  # seconds of a batch of so many requests


class PipelineStage(NamedTuple):
    """A stage of a pipeline: the group that runs it, its batch, and how long one takes."""

    group: int
    batch: int
    time: BatchTime


class _Event(NamedTuple):
    """A batch ends at a stage, or (-1) a request arrives; `number` orders what happens at once."""

    at: float
    number: int
    place: int
    requests: list[int]


@dataclass(slots=True)
class _Pipeline:
    """What waits before each stage, and when each group is free again."""

    stages: Sequence[PipelineStage]
    order: Order
    fills: bool
    queues: list[deque[int]] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # requests in a stage now
    idle: set[int] = field(default_factory=set)

    def next_of(self, group: int, *, all_arrived: bool) -> int | None:
        """Return the stage that a group begins now, if one has enough requests."""
        places = [place for place, stage in enumerate(self.stages) if stage.group == group]
        for place in reversed(places) if self.order == "deepest" else places:
            waiting = len(self.queues[place])
            if waiting and (
                waiting >= self.stages[place].batch
                or not self.fills
                or (all_arrived and self.last_of(place))
            ):
                return place
        return None

    def begin(self, place: int) -> list[int]:
        """Return the batch with which a stage begins."""
        stage, queue = self.stages[place], self.queues[place]
        batch = [queue.popleft() for _ in range(min(stage.batch, len(queue)))]
        self.running[place] += len(batch)
        self.idle.discard(stage.group)
        return batch

    def end(self, ended: _Event) -> None:
        """Pass the requests of a batch on, and free the group that ran it."""
        if ended.place >= 0:
            self.running[ended.place] -= len(ended.requests)
            self.idle.add(self.stages[ended.place].group)
        if ended.place + 1 < len(self.stages):
            self.queues[ended.place + 1].extend(ended.requests)

    def last_of(self, place: int) -> bool:
        """True if nothing more can come to a stage: it does not wait for a full batch then."""
        return not any(self.queues[:place]) and not any(self.running[:place])


def completions(
    stages: Sequence[PipelineStage],
    arrivals_s: Sequence[float],
    *,
    order: Order = "deepest",
    fills: bool = True,
) -> list[float]:
    """Return when each request has passed all stages, by rising arrivals.

    A stage begins with a full batch (with `fills`; the last ones with what there is), or with what is waiting.
    """
    pipeline = _Pipeline(stages, order, fills, [deque() for _ in stages], [0] * len(stages))
    pipeline.idle = {stage.group for stage in stages}
    done = [0.0] * len(arrivals_s)
    events = [_Event(at, number, -1, [number]) for number, at in enumerate(arrivals_s)]
    heapq.heapify(events)
    left = numbers = len(events)
    while events:
        now = events[0].at
        while events and events[0].at <= now:
            ended = heapq.heappop(events)
            left -= ended.place < 0
            pipeline.end(ended)
            if ended.place == len(stages) - 1:
                for each in ended.requests:
                    done[each] = now
        for group in sorted(pipeline.idle):
            place = pipeline.next_of(group, all_arrived=not left)
            if place is not None:
                batch = pipeline.begin(place)
                ends = now + stages[place].time(len(batch))
                heapq.heappush(events, _Event(ends, numbers, place, batch))
                numbers += 1
    return done


def pipeline_of(space: SearchSpace, schedule: RagSchedule) -> list[PipelineStage]:
    """Return the stages of a schedule up to the first token, timed by its profile (of the next power of two)."""
    where = {
        name: (number, group.units, batch)
        for number, group in enumerate(schedule.groups)
        for name, batch in zip(group.stages, group.batches, strict=True)
    }
    where["retrieval"] = (len(schedule.groups), schedule.hosts, schedule.search_batch)
    found = []
    for name in space.schema.stages:
        if name != "decode":
            group, units, most = where[name]
            found.append(PipelineStage(group, most, _timed(space, name, units, most)))
    return found


def _timed(space: SearchSpace, name: str, units: int, most: int) -> BatchTime:
    times = {batch: space.profile(name, units, batch).latency_s for batch in powers(most)}

    def time(batch: int) -> float:
        return times[1 << (batch - 1).bit_length()]

    return time


# -- a burst in micro-batches ---------------------------------------------------------------------


def burst_ttft(times: Sequence[BatchTime], burst: int, micro: int) -> float:
    """Return the mean time to first token of a burst that passes stages in batches of `micro`, each on its own chips.

    ValueError unless the burst is made of whole batches.
    """
    if micro < 1 or burst % micro:
        raise ValueError(f"batches of {micro} do not divide a burst of {burst}")
    free, first_tokens = [0.0] * len(times), []
    for _ in range(burst // micro):
        at = 0.0
        for place, time in enumerate(times):
            at = max(at, free[place]) + time(micro)
            free[place] = at
        first_tokens.append(at)
    return math.fsum(first_tokens) / len(first_tokens)


class MicroBatching(NamedTuple):
    """The best batch for a burst, the mean time to first token with it, and with the burst as one batch."""

    batch: int
    ttft_s: float
    whole_s: float

    @property
    def reduction(self) -> float:
        """The share of the time to first token that it saves."""
        return 1 - self.ttft_s / self.whole_s


def best_micro_batch(times: Sequence[BatchTime], burst: int) -> MicroBatching:
    """Return the power of two that gives a burst (a power of two too) the least mean time to first token."""
    found = {batch: burst_ttft(times, burst, batch) for batch in powers(burst)}
    best = min(found, key=lambda batch: (found[batch], -batch))
    return MicroBatching(best, found[best], found[burst])
