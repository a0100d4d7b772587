"""Pages that come back: whatever was evicted, dropped, damaged or restored, a conversation's tokens stay the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine import exactness, page_splits
from bench.engine.driver import GREEDY, Driver
from bench.engine.page_splits import COMPILED, PLAIN, STREAMS, TURNS, SplitSides, converse, text
from common.pages.identity import PAGE
from engine.decoder.executor.page_copier import TorchPageCopier
from engine.decoder.scheduler import StepLimits


@pytest.fixture(scope="module", params=[*COMPILED, PLAIN])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SplitSides:
    """Return models without windows, with windows in some layers, and in all; compiled, and plain torch."""
    kind = str(request.param)
    return page_splits.sides(kind, tmp_path_factory.mktemp(kind.partition(" ")[0]))


@pytest.mark.parametrize("sides", COMPILED, indirect=True)
@given(seed=st.integers(0, 2**32), chunk=st.sampled_from([7, 32, 64, 200]))
def test_a_conversation_is_the_same(sides: SplitSides, seed: int, chunk: int) -> None:
    """P4: random splits into turns, exact page multiples among them, with pages evicted, dropped and damaged between.

    The tokens are those of the whole prompt computed alone, and pages of one id have the same bits.
    """
    counts = converse(sides, seed, chunk)

    assert counts.wrong == []
    assert counts.splits == STREAMS * (TURNS - 1)
    assert counts.compared > 0


@pytest.mark.parametrize("sides", [PLAIN], indirect=True)
@pytest.mark.parametrize("seed", range(2))
def test_a_conversation_is_the_same_in_torch(sides: SplitSides, seed: int) -> None:
    """The same without compiled kernels: each layer waits for its pages in Python."""
    assert converse(sides, seed, 64).wrong == []


@pytest.mark.parametrize("damage", ["one bit", "no numbers"])
def test_damaged_pages_are_found(sides: SplitSides, damage: str) -> None:
    """Every page of the host is damaged: all are found so, counted, and computed anew, whatever the damage means."""
    rng = random.Random(5)
    driver = Driver(sides.runner, StepLimits(64, 3))
    prompts = [text(rng, 5 * PAGE + 3), *(text(rng, 5 * PAGE) for _ in range(6))]
    for prompt in prompts:
        driver.add(prompt, 1)
        driver.run()
        driver.settle()  # its pages lie on the host before the next prompt takes their place
    copier, tiers = sides.runner.copier, driver.tiers
    assert isinstance(copier, TorchPageCopier)
    for group, (device, host) in enumerate(zip(tiers.device, tiers.host, strict=True)):
        for page_id in list(device._by_id):
            device.forget(page_id)
        for page in host._by_id.values():
            layer = copier._bytes[group][page, rng.randrange(len(copier._bytes[group][page]))]
            if damage == "one bit":
                layer[0] ^= 1
            else:
                layer[:] = 0xFF
    again = [driver.add(prompt, 4) for prompt in prompts]
    loaded = copier.moved_bytes["load"]
    driver.run()

    expected = exactness.generate(
        sides.oracle, [sequence.prompt for sequence in again], 4, GREEDY, seed=1
    )
    assert [sequence.output for sequence in again] == expected
    assert tiers.corrupt > 0
    assert copier.moved_bytes["load"] > loaded  # the tier was read
