"""Cycles that Falcon's hardware takes for a walk: pipelines of units that fetch and compare, and a queue that sorts.

Jiang, "Vector-Centric Machine Learning Systems" (2025), sections 7.3 and 7.5.1. A query has one control unit with a
systolic queue, and one or several units, each with a memory channel, that ask the Bloom filter (a node a cycle), fetch
vectors (64 reads under way) and compute distances as fast as they come. The groups' distances are inserted in their
order, two cycles each; then the queue is sorted and the next groups are launched. Cycles are of 200 MHz.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.delayed_traversal import Evaluation, Traversal

BEAT_BYTES = 64  # of a fetch unit's FIFO, a cycle
INSERT_CYCLES = 2
HERTZ = 200e6


@dataclass(frozen=True, slots=True)
class FalconHardware:
    """`units` that fetch and compare for one query; a read comes `latency` cycles after it was asked for.

    The thesis does not give the latency (memory, its controller and the pipelines behind): it is fitted. Its text has
    distances enter the queue while others are computed (`streamed`), its algorithm once the group is done.
    """

    units: int
    vector_bytes: int
    latency: int
    streamed: bool = True
    queue: int = 64
    outstanding: int = 64


def cycles(walk: Traversal, hardware: FalconHardware) -> int:
    """Return how many cycles a walk takes from its first launch to the last sorting."""
    return _Pipeline(hardware).run(walk)


def steady(hops: int, groups: int, candidates: int, evaluation: Evaluation) -> Traversal:
    """Return the shape of a walk of so many hops whose groups are always full and every candidate alike."""
    total = max(round(hops / candidates), groups + 1)
    made = [[evaluation] * candidates for _ in range(total)]
    launched = [made[:1], made[1 : groups + 1], *([each] for each in made[groups + 1 :])]
    return Traversal(launched=launched + [[] for _ in range(total + 1 - len(launched))])


class _Pipeline:
    def __init__(self, hardware: FalconHardware) -> None:
        self._hardware = hardware
        self._beats = -(-hardware.vector_bytes // BEAT_BYTES)
        self._links_free = 0
        self._filter_free = [0] * hardware.units
        self._arrivals: list[list[int]] = [[] for _ in range(hardware.units)]

    def run(self, walk: Traversal) -> int:
        now = 0
        flying: list[list[int]] = []
        for number, after in enumerate(walk.launched):
            if number > 0:
                for arrival in flying.pop(0):
                    now = max(now, arrival) + INSERT_CYCLES
                now += self._hardware.queue - 1
            for group in after:
                flying.append(self._evaluate(group, now))
                now += len(group)
        return now

    def _evaluate(self, group: Sequence[Evaluation], now: int) -> list[int]:
        """Return the cycles at which a group's distances come out, in order."""
        came: list[int] = []
        for number, each in enumerate(group):
            beats = -(-4 * each.links // BEAT_BYTES)
            begin = max(now + number, self._links_free)
            self._links_free = begin + beats
            came += self._fetch(each, begin + self._hardware.latency + beats)
        return sorted(came) if self._hardware.streamed else [max(came, default=now)] * len(came)

    def _fetch(self, each: Evaluation, linked: int) -> list[int]:
        """Return when the vectors of a candidate's new neighbours have come, its links being known from `linked` on."""
        units, latency, window = (
            self._hardware.units,
            self._hardware.latency,
            self._hardware.outstanding,
        )
        asked = -(-each.links // units)
        begins = [max(linked, free) for free in self._filter_free]
        self._filter_free = [begin + asked for begin in begins]
        came = []
        for number in range(each.fresh):
            unit, place = number % units, number // units
            arrivals = self._arrivals[unit]
            share = -(-each.fresh // units)
            request = begins[unit] + 1 + place * asked // share
            if len(arrivals) >= window:
                request = max(request, arrivals[-window])
            last = arrivals[-1] if arrivals else 0
            arrivals.append(max(request + latency, last) + self._beats)
            came.append(arrivals[-1])
        return came
