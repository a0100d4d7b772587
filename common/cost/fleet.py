"""The fleet for a load: number and cost of its instances, with spill and without (WindVE, Eq. 5 to 12).

An instance is a group of accelerators with the CPUs beside them. Sized by peak, the instances must hold all queries
that arrive at once; sized by average, they must only keep up with the mean rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

HOURS_A_MONTH = 730
_ROUNDING = 1e-9  # a quotient this close below a whole number counts as that number
_SAME = 1e-6  # of the SLO: the precision of timestamps, which are floats in seconds since 1970


class PricedDevice(NamedTuple):
    """One device with its line (Eq. 12): C queries at once take alpha_s * C + beta_s seconds; alpha_s is above 0."""

    alpha_s: float
    beta_s: float

    def depth(self, slo_s: float) -> int:
        """Return the most queries at once that end within `slo_s` (Eq. 7 to 10); 0 if not even one does (Eq. 11)."""
        return max(0, math.floor((slo_s - self.beta_s) / self.alpha_s + _ROUNDING))

    def throughput(self, slo_s: float) -> float:
        """Return the queries a second of a device that works at its depth."""
        depth = self.depth(slo_s)
        return depth / (self.alpha_s * depth + self.beta_s) if depth else 0.0


class OfferedLoad(NamedTuple):
    """A load: its queries in all, the seconds in which they arrive, and the most queries at once."""

    queries: int
    duration_s: float
    rate: float
    peak: int


class Fleet(NamedTuple):
    """The number and hourly cost of instances; a month has 730 hours."""

    instances: int
    cost_per_hour: float

    @property
    def cost_per_month(self) -> float:
        """The cost of all instances in a month."""
        return self.cost_per_hour * HOURS_A_MONTH


class FleetComparison(NamedTuple):
    """The fleets for the same load: with accelerators only, and with spill to their CPUs."""

    alone: Fleet
    spilling: Fleet

    @property
    def saving(self) -> float:
        """The share of the cost that spill saves; negative if the CPUs cost more than they save."""
        return 1 - self.spilling.cost_per_hour / self.alone.cost_per_hour


def peak(times_s: Sequence[float], counts: Sequence[int], slo_s: float) -> int:
    """Return the most queries that arrive in any half-open window of `slo_s` seconds; `times_s` rise.

    A query may stay for `slo_s`, so the system must hold this many queries at once.
    """
    most = held = first = 0
    window_s = slo_s * (1 - _SAME)
    for at, count in zip(times_s, counts, strict=True):
        held += count
        while at - times_s[first] >= window_s:
            held -= counts[first]
            first += 1
        most = max(most, held)
    return most


def load(times_s: Sequence[float], counts: Sequence[int], slo_s: float) -> OfferedLoad:
    """Return the load of a trace with at least one arrival: `counts[i]` queries at `times_s[i]`, which rise.

    The queries count as spread over the trace's duration, or over `slo_s` if that is longer, since their work may take
    that long.
    """
    queries, duration_s = sum(counts), times_s[-1] - times_s[0]
    rate = queries / max(duration_s, slo_s)
    return OfferedLoad(queries, duration_s, rate, peak(times_s, counts, slo_s))


def saving(more: float) -> float:
    """Return the share that spill saves of a large fleet sized by peak: S = G / (1 + G), G = C_cpu / C_acc (`more`)."""
    return more / (1 + more)


def by_peak(load_: OfferedLoad, depth: int, price: float) -> Fleet:
    """Return the fleet that holds the peak (Eq. 6); `price` is an instance's cost per hour, `depth` at least 1."""
    return _fleet(load_.peak / depth, price)


def by_average(load_: OfferedLoad, throughput: float, price: float) -> Fleet:
    """Return the fleet that keeps up with the average rate (Eq. 5); it may refuse queries at peaks."""
    return _fleet(load_.rate / throughput, price)


def _fleet(needed: float, price: float) -> Fleet:
    instances = max(1, math.ceil(needed - _ROUNDING))
    return Fleet(instances, instances * price)


def compare(
    load_: OfferedLoad,
    accelerator: PricedDevice,
    cpu: PricedDevice,
    slo_s: float,
    *,
    price: float,
    cpu_price: float = 0.0,
) -> tuple[FleetComparison, FleetComparison]:
    """Return the fleets by peak and by average; ValueError if the accelerator's depth is 0.

    `price` is the cost per hour of an instance's accelerators, `cpu_price` of its CPUs, which counts only with spill.
    """
    depth, more = accelerator.depth(slo_s), cpu.depth(slo_s)
    if not depth:
        raise ValueError("the accelerator cannot finish a single query within the SLO")
    rate, faster = accelerator.throughput(slo_s), cpu.throughput(slo_s)
    both = price + cpu_price if more else price
    return (
        FleetComparison(by_peak(load_, depth, price), by_peak(load_, depth + more, both)),
        FleetComparison(by_average(load_, rate, price), by_average(load_, rate + faster, both)),
    )
