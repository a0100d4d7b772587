"""An engine whose sequences are at home on the device or on the host gives the tokens of the device alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.engine import home_runs
from bench.engine.home_runs import HomeCounts, HomeSides
from engine.decoder.offload.plan import OffloadMode
from tests.conftest import PROFILE, SEED

USES_HOST = [mode for mode in OffloadMode if mode not in {OffloadMode.DEVICE, OffloadMode.SWAP}]
SOAK = 20_000 // (len(home_runs.KINDS) * len(USES_HOST))
RUNS = SOAK if PROFILE == "soak" else 3
TRIES = 10 * RUNS


@pytest.fixture(scope="module", params=home_runs.KINDS)
def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HomeSides]:
    found = home_runs.sides(request.param, tmp_path_factory.mktemp("model"))
    yield found
    found.executor.close()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("mode", OffloadMode)
async def test_answers_are_those_of_the_device_alone(sides: HomeSides, mode: OffloadMode) -> None:
    """Random arrivals, aborts, extensions, pages forgotten in mid-step, shared prompts, several choices, few pages.

    A run counts only if both sides attended, in modes in which both can.
    """
    counted: list[HomeCounts] = []
    for seed in range(SEED, SEED + TRIES):
        counts = await home_runs.compare(sides, seed, mode)
        assert (seed, counts.wrong) == (seed, [])
        if mode not in USES_HOST or (counts.device and counts.host):
            counted.append(counts)
        if len(counted) == RUNS:
            break

    assert len(counted) == RUNS
    if RUNS == SOAK:
        assert sum(each.aborted for each in counted) > 0
        assert sum(each.shared for each in counted) > 0
        assert sum(each.extended for each in counted) > 0
        windowed = None not in sides.executor.shape.windows  # its pages hardly ever run out
        assert windowed or sum(each.preempted for each in counted) > 0
