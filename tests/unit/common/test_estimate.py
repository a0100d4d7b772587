"""The depth estimator on devices on paper: exact without noise, near with it, and tuned where the line is none."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost.estimate import estimate, largest, tune, tune_beside

# Seconds a query and a batch of the paper's devices: its beta, and alpha in the middle of what its depths allow.
DEVICES = {
    "V100": (0.01793, 0.27),
    "Xeon": (0.0820, 0.32),
    "Atlas": (0.009005, 0.24),
    "Kunpeng": (0.07345, 0.85),
}


def device(
    alpha_s: float, beta_s: float, sigma: float = 0.0, seed: int = 0
) -> Callable[[int], Awaitable[float]]:
    rng = random.Random(seed)

    async def probe(queries: int) -> float:
        return (beta_s + alpha_s * queries) * max(0.1, rng.gauss(1, sigma))

    return probe


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("slo_s", [1.0, 2.0])
def test_the_papers_devices(name: str, slo_s: float) -> None:
    """Exact on a linear device; with 3 % noise within one of that in the median of 20 seeds."""
    alpha_s, beta_s = DEVICES[name]
    exact = math.floor((slo_s - beta_s) / alpha_s)
    found = asyncio.run(estimate(device(alpha_s, beta_s), slo_s))
    assert found.depth == exact
    assert found.r2 == pytest.approx(1.0)
    noisy = [
        asyncio.run(estimate(device(alpha_s, beta_s, 0.03, seed), slo_s)) for seed in range(20)
    ]
    assert abs(statistics.median(one.depth for one in noisy) - exact) <= 1


@given(st.floats(1e-4, 0.5), st.floats(0, 3), st.floats(0.1, 4))
def test_depth_keeps_the_objective(alpha_s: float, beta_s: float, slo_s: float) -> None:
    """t(depth) <= slo < t(depth + 1), to the precision of a fit; 0 where one query misses it."""
    found = asyncio.run(estimate(device(alpha_s, beta_s), slo_s))
    if alpha_s + beta_s > slo_s:
        assert found.depth == 0
    else:
        assert beta_s + alpha_s * (found.depth - 1e-3) <= slo_s
        assert slo_s < beta_s + alpha_s * (found.depth + 1 + 1e-3)
        assert max(queries for queries, _ in found.points) <= max(found.depth, 32)


@given(st.integers(0, 500), st.integers(-5, 600), st.integers(1, 500))
def test_largest(limit: int, start: int, most: int) -> None:
    """The search finds the limit wherever it starts, and asks little when it starts near."""
    asked = []

    async def holds(number: int) -> bool:
        asked.append(number)
        assert 0 < number <= most
        return number <= limit

    assert asyncio.run(largest(holds, start, most=most)) == min(limit, most)
    if abs(start - limit) <= 2 and 0 < limit < most:
        assert len(asked) <= 6


@given(
    st.floats(0.005, 0.05), st.floats(0.05, 0.3), st.floats(-2e-3, 4e-3),
    st.floats(0.02, 0.2), st.floats(0.05, 0.5), st.floats(0, 0.02), st.floats(0, 0.002),
)  # fmt: skip
def test_tuning_curved_devices_that_disturb_each_other(
    alpha_s: float, beta_s: float, bend: float, cpu_alpha_s: float, cpu_beta_s: float,
    harms_cpu: float, harms_accelerator: float,
) -> None:  # fmt: skip
    """Within one of exhaustive search: the accelerator as deep as alone, the CPU as deep as neither misses."""
    slo_s = 1.0

    def accelerator(a: int, c: int) -> float:
        return (beta_s + alpha_s * a) * (1 + bend * a) + harms_accelerator * c * (a > 0)

    def cpu(a: int, c: int) -> float:
        return cpu_beta_s + cpu_alpha_s * c + harms_cpu * cpu_alpha_s * a

    def most(fits: Callable[[int], bool]) -> int:
        count = 0
        while count < 400 and fits(count + 1):
            count += 1
        return count

    async def alone(queries: int) -> float:
        return accelerator(queries, 0)

    async def both(a: int, c: int) -> tuple[float, float]:
        return accelerator(a, c), cpu(a, c)

    async def run() -> tuple[int, int]:
        first = await estimate(alone, slo_s, most=400)
        deep = await tune(alone, slo_s, first.depth, most=400)
        return deep, await tune_beside(both, slo_s, deep, 8, most=400)

    deep, beside = asyncio.run(run())
    best = most(lambda n: accelerator(n, 0) <= slo_s)
    assert abs(deep - best) <= 1
    fits = most(lambda n: max(accelerator(deep, n), cpu(deep, n)) <= slo_s)
    assert abs(beside - fits) <= 1
