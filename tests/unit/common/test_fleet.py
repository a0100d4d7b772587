"""What a load costs: WindVE's equations, and the numbers of its tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost import fleet
from common.cost.fleet import OfferedLoad, PricedDevice

DEVICES = st.builds(PricedDevice, st.floats(1e-4, 0.5), st.floats(0, 2))
SLOS = st.floats(0.05, 5)
# Whole milliseconds, so that a brute-force count has no rounding of its own.
ARRIVALS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 4)), min_size=1, max_size=60)
# The paper's devices: alpha recovered from its depths, beta as it states it.
V100, XEON = PricedDevice(0.01793, 0.27), PricedDevice(0.082, 0.32)
ATLAS, KUNPENG = PricedDevice(0.009005, 0.24), PricedDevice(0.0735, 0.85)


@pytest.mark.parametrize(
    ("device", "at_1_s", "at_2_s"),
    [(V100, 40, 96), (XEON, 8, 20), (ATLAS, 84, 195), (KUNPENG, 2, 15)],
)
def test_the_papers_depths(device: PricedDevice, at_1_s: int, at_2_s: int) -> None:
    """Table III, rows of the linear regression."""
    assert (device.depth(1.0), device.depth(2.0)) == (at_1_s, at_2_s)


@given(DEVICES, SLOS)
def test_depth_is_the_most_within_the_slo(device: PricedDevice, slo_s: float) -> None:
    """As many as the depth end in time and one more does not; 0 where not even one does."""
    depth = device.depth(slo_s)

    def seconds(count: int) -> float:
        return device.alpha_s * count + device.beta_s

    assert depth == 0 or seconds(depth) <= slo_s * (1 + 1e-6)
    assert seconds(depth + 1) > slo_s * (1 - 1e-6)
    assert (device.throughput(slo_s) == 0) == (depth == 0)
    if depth:
        assert device.throughput(slo_s) == pytest.approx(depth / seconds(depth))


def test_a_quotient_that_is_whole() -> None:
    """(1 - 0.06) / 0.01 is 94 in decimals and a little less as a float; 25 queries a second are twice 12 in 0.96 s."""
    assert PricedDevice(0.01, 0.06).depth(1.0) == 94
    assert (
        fleet.by_average(
            OfferedLoad(1, 1.0, 25.0, 1), PricedDevice(0.05, 0.36).throughput(1.0), 1
        ).instances
        == 2
    )


@given(ARRIVALS, st.integers(1, 3000))
def test_the_peak(arrivals: list[tuple[int, int]], window_ms: int) -> None:
    """The sliding window finds what counting every window finds; arrivals a whole window apart do not meet."""
    arrivals.sort()
    expected = max(
        sum(count for at, count in arrivals if begin <= at < begin + window_ms)
        for begin, _ in arrivals
    )

    found = fleet.peak(
        [at / 1000 for at, _ in arrivals], [count for _, count in arrivals], window_ms / 1000
    )

    assert found == expected


def test_a_window_apart_in_floats() -> None:
    """2.3 - 1.3 is a little less than 1 as a float, and the two queries do not meet."""
    assert fleet.peak([1.3, 2.3], [1, 1], 1.0) == 1
    assert fleet.peak([1.3, 2.2999], [1, 1], 1.0) == 2


@given(ARRIVALS, SLOS)
def test_the_load(arrivals: list[tuple[int, int]], slo_s: float) -> None:
    """All queries over the duration, or over the SLO where a burst is shorter; the peak is among them."""
    arrivals.sort()
    times, counts = [at / 1000 for at, _ in arrivals], [count for _, count in arrivals]

    load = fleet.load(times, counts, slo_s)

    assert load.queries == sum(counts)
    assert load.rate * max(load.duration_s, slo_s) == pytest.approx(load.queries)
    assert max(counts) <= load.peak <= load.queries
    assert load.peak >= math.floor(load.rate * slo_s / 2)


@given(st.integers(1, 500), st.integers(0, 500))
def test_saving_and_gain_are_one(accelerator: int, cpu: int) -> None:
    """S = C_cpu / (C_cpu + C_acc) = G / (1 + G)."""
    assert fleet.saving(cpu / accelerator) == pytest.approx(cpu / (cpu + accelerator))


def test_the_papers_saving() -> None:
    """Table I, 96 + 22 at 2 s: the stated 18.6 % is a gain of 22.9 %, not of the 22.3 % in the text."""
    assert fleet.saving(22 / 96) == pytest.approx(0.186, abs=5e-4)
    assert fleet.saving(0.223) != pytest.approx(0.186, abs=3e-3)


@given(DEVICES, DEVICES, SLOS, st.integers(1, 100_000), st.floats(1e-3, 1e4))
def test_fleets(
    accelerator: PricedDevice, cpu: PricedDevice, slo_s: float, peak: int, rate: float
) -> None:
    """A fleet holds the load, one instance fewer does not, and spill never needs more; saving tends to S."""
    load, slots = OfferedLoad(peak, 1.0, rate, peak), accelerator.depth(slo_s)
    if not slots:
        with pytest.raises(ValueError, match="cannot finish a single query"):
            fleet.compare(load, accelerator, cpu, slo_s, price=1)
        return

    by_peak, by_average = fleet.compare(load, accelerator, cpu, slo_s, price=3)

    count = by_peak.alone.instances
    assert (count - 1) * slots < peak <= count * slots
    speed, count = accelerator.throughput(slo_s), by_average.alone.instances
    assert count == 1 or (count - 1) * speed <= rate
    assert rate <= count * speed * (1 + 1e-6)
    faster, count = speed + cpu.throughput(slo_s), by_average.spilling.instances
    assert count == 1 or (count - 1) * faster <= rate
    assert rate <= count * faster * (1 + 1e-6)
    for each in (by_peak, by_average):
        assert each.spilling.instances <= each.alone.instances
        assert each.spilling.instances >= 1
        assert each.alone.cost_per_hour == 3 * each.alone.instances
        assert each.alone.cost_per_month == 730 * each.alone.cost_per_hour
        assert 0 <= each.saving < 1
    expected = fleet.saving(cpu.depth(slo_s) / accelerator.depth(slo_s))
    assert by_peak.saving == pytest.approx(expected, abs=slots / peak + 1e-9)


def test_next_to_nothing() -> None:
    """Whoever asks once in a lifetime is served, too."""
    assert fleet.by_average(OfferedLoad(1, 1e12, 1e-12, 1), 1.0, 3.0).instances == 1


def test_what_the_cpus_cost() -> None:
    """Their price is paid with spill only, and not where they can take nothing."""
    load = OfferedLoad(100, 10.0, 10.0, 100)
    peak, _ = fleet.compare(
        load, PricedDevice(0.1, 0.0), PricedDevice(0.2, 0.0), 1.0, price=2, cpu_price=3
    )
    assert [each.instances for each in peak] == [10, 7]
    assert [each.cost_per_hour for each in peak] == [20, 35]
    assert peak.saving == pytest.approx(-0.75)

    idle, _ = fleet.compare(
        load, PricedDevice(0.1, 0.0), PricedDevice(2.0, 0.0), 1.0, price=2, cpu_price=3
    )
    assert idle.alone == idle.spilling
