"""Pages that come back: whatever was evicted, dropped, damaged or restored, a conversation's tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine import exactness, random_models
from bench.engine.driver import GREEDY, Driver
from common.pages.identity import PAGE, PageId
from engine.decoder.executor.page_copier import TorchPageCopier
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.kv.tiers import TierPolicy
from engine.decoder.scheduler import StepLimits

DEVICE, HOST = 18, 60  # pages
NEW, TURNS = 24, 3
COMPILED = ["llama fp32", "qwen2 bf16", "mistral int8"]
WINDOWED: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 50,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}


class Sides(NamedTuple):
    """The same model twice: with few pages in two tiers, and with many in one, to compare with."""

    runner: TorchExecutor
    oracle: TorchExecutor


@pytest.fixture(scope="module", params=[*COMPILED, "llama torch"])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """Return models without windows, with windows in some layers, and in all; compiled, and plain torch."""
    family, kind = str(request.param).split()
    chosen = random_models.settings(family, 1)
    windows = {"qwen2": WINDOWED, "mistral": {"sliding_window": 40}}
    directory = tmp_path_factory.mktemp(family)
    random_models.write(directory, family, chosen | windows.get(family, {}))
    compiled = kind != "torch"
    load = partial(
        TorchExecutor.load,
        str(directory),
        device="cpu",
        dtype=kind if compiled else "fp32",
        compiled=compiled,
        threads=2,
    )
    oracle = load(kv_bytes=8 << 20)
    each = sum(oracle.shape.page_bytes)
    return Sides(load(kv_bytes=DEVICE * each, host_bytes=HOST * each), oracle)


class Pages:
    """What every page that ever had an id held: an id names its bytes, computed or restored, in any tier."""

    def __init__(self, driver: Driver) -> None:
        assert isinstance(driver.runner.copier, TorchPageCopier)
        self._driver, self._copier = driver, driver.runner.copier
        self._known: dict[tuple[int, PageId], bytes] = {}
        self.compared = 0

    def look(self) -> None:
        """Compare what lies on the device now with what the same ids held before."""
        tiers = self._driver.tiers
        for group, pool in enumerate(tiers.device):
            data = self._copier._device[group].raw()
            for page_id, page in pool._by_id.items():
                held = data[page].tobytes()
                before = self._known.setdefault((group, page_id), held)
                self.compared += before is not held
                assert before == held

    def flip(self, rng: random.Random) -> bool:
        """Flip one bit of a page of the host; False if it has none that rests there."""
        group = rng.randrange(len(self._driver.tiers.host))
        pool = self._driver.tiers.host[group]
        resting = [page for page in pool._by_id.values() if not pool.references(page)]
        if not resting:
            return False
        memory = self._copier._bytes[group][rng.choice(resting)]
        memory[rng.randrange(len(memory)), rng.randrange(memory.shape[1])] ^= np.uint8(
            1 << rng.randrange(8)
        )
        return True

    def drop(self, rng: random.Random) -> None:
        """Evict pages anywhere, leading, middle or last, from a tier."""
        tiers = self._driver.tiers
        group = rng.randrange(len(tiers.device))
        pool = rng.choice((tiers.device, tiers.host))[group]
        resting = [name for name, page in pool._by_id.items() if not pool.references(page)]
        for page_id in rng.sample(resting, rng.randint(0, len(resting))):
            pool.forget(page_id)


@pytest.mark.parametrize("sides", COMPILED, indirect=True)
@given(seed=st.integers(0, 2**32), chunk=st.sampled_from([7, 32, 64, 200]))
def test_a_conversation_is_the_same(sides: Sides, seed: int, chunk: int) -> None:
    """P4: random splits into turns, exact page multiples among them, with pages evicted, dropped and damaged between.

    The tokens are those of the whole prompt computed alone, and pages of one id have the same bits.
    """
    _converse(sides, seed, chunk)


@pytest.mark.parametrize("sides", ["llama torch"], indirect=True)
@pytest.mark.parametrize("seed", range(2))
def test_a_conversation_is_the_same_in_torch(sides: Sides, seed: int) -> None:
    """The same without compiled kernels: each layer waits for its pages in Python."""
    _converse(sides, seed, 64)


def _converse(sides: Sides, seed: int, chunk: int) -> None:
    rng = random.Random(seed)
    policy = rng.choice(["lru", "lru-conversation", "s3fifo", "pensieve", "spillway"])
    driver = Driver(sides.runner, StepLimits(chunk, 3), TierPolicy(policy))
    pages = Pages(driver)
    histories = [_text(rng, rng.choice((PAGE, 2 * PAGE, rng.randint(1, 90)))) for _ in range(3)]
    flipped = 0
    for _ in range(TURNS):
        asked = []
        for history in histories:
            if len(history) % PAGE and rng.random() < 0.5:
                history.extend(_text(rng, PAGE - len(history) % PAGE))  # an exact multiple
            asked.append(driver.add(history, rng.randint(1, NEW)))
        driver.run()
        driver.settle()
        if sides.runner.exact:
            pages.look()
        expected = _alone(sides, [(sequence.prompt, len(sequence.output)) for sequence in asked])
        for sequence, history, answer in zip(asked, histories, expected, strict=True):
            assert sequence.output == answer
            history.extend([*sequence.output, *_text(rng, rng.randint(1, 40))])
        flipped += pages.flip(rng)
        pages.drop(rng)
    assert driver.tiers.corrupt <= flipped
    driver.scheduler.check()


def test_one_flipped_bit_is_found(sides: Sides) -> None:
    """Every page of the host is damaged in one bit: all are found so, counted, and computed anew."""
    rng = random.Random(5)
    driver = Driver(sides.runner, StepLimits(64, 3))
    prompts = [_text(rng, 5 * PAGE + 3), *(_text(rng, 5 * PAGE) for _ in range(6))]
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
            copier._bytes[group][page, rng.randrange(len(copier._bytes[group][page])), 0] ^= 1
    again = [driver.add(prompt, 4) for prompt in prompts]
    loaded = copier.moved_bytes["load"]
    driver.run()

    expected = exactness.generate(
        sides.oracle, [sequence.prompt for sequence in again], 4, GREEDY, seed=1
    )
    assert [sequence.output for sequence in again] == expected
    assert tiers.corrupt > 0
    assert copier.moved_bytes["load"] > loaded  # the tier was read


def _alone(sides: Sides, asked: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Return what is generated where nothing was kept: every prompt is computed whole."""
    driver = Driver(sides.oracle, StepLimits(512, 8))
    sequences = [driver.add(prompt, new, str(n)) for n, (prompt, new) in enumerate(asked)]
    driver.run()
    assert not any(sequence.cached for sequence in sequences)
    return [sequence.output for sequence in sequences]


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(random_models.VOCABULARY) for _ in range(length)]
