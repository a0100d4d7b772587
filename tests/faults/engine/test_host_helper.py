"""Helpers of attention on the host that are killed and stopped amid steps, over every kind of channel.

`make soak` runs many times as many.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from torch import Tensor

from bench.engine import home_runs
from bench.engine.helper_process import helper_process, local_address, wait_until
from bench.engine.home_runs import HomeSides
from common.types.helper_address import ChannelKind, HelperAddress
from engine.decoder.executor.host_attention import (
    HostAttention,
    HostFronts,
    HostResult,
    HostSubBatch,
)
from engine.decoder.executor.host_link import Ready
from engine.decoder.offload.plan import OffloadMode
from engine.host.helped_attention import HelpedAttention
from engine.kernels.attention_plan import QueryRows
from engine.kernels.partial import Partial
from engine.kernels.two_sides import SplitRows

SOAK = os.environ.get("SPILLWAY_PROFILE") == "soak"
KILLS = 60 if SOAK else 2
PATIENT_S, IMPATIENT_S = 3600.0, 0.02
MODES = (OffloadMode.FULL, OffloadMode.ASYMMETRIC, OffloadMode.SIMPLE)


class DisturbedAttention:
    """Lets another one attend, and does something when so many layers have been handed to the host.

    It counts layers of sub-batches, or with `fronts` layers of fronts.
    """

    def __init__(self, inner: HostAttention, *, fronts: bool = False) -> None:
        self.inner, self.fronts = inner, fronts
        self.submitted = 0
        self.then: list[tuple[int, Callable[[], None]]] = []

    def plan(self, queries: Sequence[QueryRows]) -> HostSubBatch:
        inner = self.inner.plan(queries)
        return inner if self.fronts else _DisturbedSubBatch(self, inner)

    def plan_fronts(self, queries: Sequence[SplitRows]) -> HostFronts:
        inner = self.inner.plan_fronts(queries)
        return _DisturbedFronts(self, inner) if self.fronts else inner

    def close(self) -> None:
        self.inner.close()

    def count(self) -> None:
        """Count a layer, and do what is due."""
        self.submitted += 1
        while self.then and self.then[0][0] <= self.submitted:
            self.then.pop(0)[1]()


class _DisturbedSubBatch:
    def __init__(self, attention: DisturbedAttention, inner: HostSubBatch) -> None:
        self._attention, self._inner = attention, inner

    def submit(
        self, group: int, at: int, joined: Tensor, out: Tensor, ready: Ready | None = None
    ) -> HostResult:
        found = self._inner.submit(group, at, joined, out, ready)
        self._attention.count()
        return found


class _DisturbedFronts:
    def __init__(self, attention: DisturbedAttention, inner: HostFronts) -> None:
        self._attention, self._inner = attention, inner

    def submit(
        self, group: int, at: int, joined: Tensor, found: Partial, ready: Ready | None = None
    ) -> HostResult:
        waits = self._inner.submit(group, at, joined, found, ready)
        self._attention.count()
        return waits


class Scene(NamedTuple):
    """Both sides, what disturbs the side that is helped, and the address of its helpers."""

    sides: HomeSides
    disturbed: DisturbedAttention
    helped: HelpedAttention
    address: HelperAddress


@pytest.fixture(params=get_args(ChannelKind))
def address(request: pytest.FixtureRequest, tmp_path: Path) -> HelperAddress:
    return local_address(request.param, tmp_path)


@pytest.fixture(params=home_runs.KINDS if SOAK else home_runs.KINDS[1:2])
def scene(
    request: pytest.FixtureRequest, tmp_path: Path, address: HelperAddress
) -> Iterator[Scene]:
    sides = home_runs.sides(request.param, tmp_path / "model", address)
    stages = sides.executor.stages
    assert stages is not None
    assert isinstance(stages.attention, HelpedAttention)
    helped, disturbed = stages.attention, DisturbedAttention(stages.attention)
    stages.attention = disturbed
    yield Scene(sides, disturbed, helped, address)
    sides.executor.close()


@pytest.mark.timeout(0 if SOAK else 120)
async def test_tokens_are_those_of_the_device_alone(
    scene: Scene, tmp_path: Path, seed: int
) -> None:
    """Each helper attends, stands still, goes on, and is killed amid a step; the next one attends to those pages."""
    print(f"seed {seed}")
    draw, helped, disturbed = random.Random(seed), scene.helped, scene.disturbed
    wrong: list[str] = []
    for kill in range(KILLS):
        with ExitStack() as stack:
            helper = stack.enter_context(helper_process(scene.address, tmp_path))
            wait_until(lambda: helped.listener.channel)
            helped.patience_s = PATIENT_S
            before = helped.layers["helper"]
            number = 0
            while helped.layers["helper"] == before:
                counts = await home_runs.compare(scene.sides, seed + number, draw.choice(MODES))
                wrong += counts.wrong
                number += 1
            helped.patience_s = IMPATIENT_S
            at = disturbed.submitted
            stopped, woken, killed = sorted(at + draw.randrange(1, 200) for _ in range(3))
            disturbed.then = [
                (stopped, lambda: helper.send_signal(signal.SIGSTOP)),  # noqa: B023 - done within this turn
                (woken, lambda: helper.send_signal(signal.SIGCONT)),  # noqa: B023
                (killed, helper.kill),
            ]
            while disturbed.then:
                mode = draw.choice(MODES)
                counts = await home_runs.compare(scene.sides, seed + 1000 * kill + number, mode)
                wrong += counts.wrong
                number += 1
        wait_until(lambda: helped.listener.channel is None)

    assert wrong == []
    assert helped.layers["helper"] > 0
    assert helped.layers["late"] > 0
    assert helped.listener.channel is None


@pytest.mark.timeout(0 if SOAK else 120)
async def test_a_helper_killed_amid_fronts_changes_no_token(tmp_path: Path, seed: int) -> None:
    """Helpers attend to fronts of sequences over both tiers until they are killed; tokens are the device's."""
    print(f"seed {seed}")
    draw, address = random.Random(seed), local_address("unix", tmp_path)
    sides = home_runs.sides("llama fp32", tmp_path / "model", address, sizes=home_runs.LONG)
    stages = sides.executor.stages
    assert stages is not None
    assert isinstance(stages.attention, HelpedAttention)
    helped = stages.attention
    helped.patience_s = PATIENT_S
    disturbed = stages.attention = DisturbedAttention(helped, fronts=True)
    wrong, number = list[str](), 0
    for kill in range(1, KILLS + 1):
        with helper_process(address, tmp_path) as helper:
            wait_until(lambda: helped.listener.channel)
            disturbed.then = [(disturbed.submitted + draw.randrange(1, 100), helper.kill)]
            while disturbed.then:
                counts = await home_runs.compare(
                    sides, seed + number, OffloadMode.ASYMMETRIC, home_runs.LONG, split=True
                )
                wrong += counts.wrong
                number += 1
        wait_until(lambda: helped.listener.channel is None)
        assert disturbed.submitted >= kill
    sides.executor.close()

    assert wrong == []
    assert helped.layers["helper"] > 0
    assert sides.executor.on_both > 0
