"""An engine whose sequences are at home on the device or on the host gives the tokens of the device alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.engine import home_runs
from bench.engine.home_runs import HomeSides
from engine.decoder.offload.plan import OffloadMode

RUNS = 3


@pytest.fixture(scope="module", params=home_runs.KINDS)
def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HomeSides]:
    found = home_runs.sides(request.param, tmp_path_factory.mktemp("model"))
    yield found
    found.executor.close()


@pytest.mark.parametrize("mode", OffloadMode)
async def test_answers_are_those_of_the_device_alone(sides: HomeSides, mode: OffloadMode) -> None:
    """Random arrivals and aborts in mid-step, shared prompts, several choices, penalties, pages for two sequences."""
    counts = [await home_runs.compare(sides, seed, mode) for seed in range(RUNS)]

    assert [wrong for each in counts for wrong in each.wrong] == []
    assert sum(each.compared for each in counts) > RUNS
    if mode not in (OffloadMode.DEVICE, OffloadMode.SWAP):
        assert sum(each.host for each in counts) > 0
    if mode is not OffloadMode.DEVICE:
        assert sum(each.device for each in counts) > 0
