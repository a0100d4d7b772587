"""The channel to a helper process: the same bits whatever becomes of the helper; one of another build is refused."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import ROOT
from bench.engine.helper_process import helper_process, local_address, wait_until
from common.errors import ConfigError
from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment, attach
from common.types.helper_address import ChannelKind, HelperAddress
from engine.decoder.executor.torch_executor import StepRows
from engine.host import handshake
from engine.host.channel import ChannelLibrary, load_channel
from engine.host.helped_attention import ROWS
from engine.host.helper import HostHelper
from engine.models.decoders.compiled_decoder import load_kernels
from tests.support.host_sides import (
    NEVER_S,
    PAGES,
    Sides,
    check_fronts,
    check_same,
    step,
    two_sides,
)

pytestmark = pytest.mark.skipif(
    load_kernels() is None or load_channel() is None, reason="no compiler for the kernels"
)


@pytest.fixture(params=get_args(ChannelKind))
def address(request: pytest.FixtureRequest, tmp_path: Path) -> HelperAddress:
    return local_address(request.param, tmp_path)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def sides(request: pytest.FixtureRequest, address: HelperAddress) -> Iterator[Sides]:
    with two_sides(address, request.param) as made:
        yield made


@pytest.mark.sampled(2)
def test_a_helper_attends(sides: Sides, tmp_path: Path) -> None:
    """Random steps: the same bits without a helper, with one, after it has left, and with the next one."""
    layers = sides.helped.layers

    @given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(0, 1 << 30))
    def compare(lengths: list[int], seed: int) -> None:
        check_same(sides, seed, lengths=tuple(lengths))

    check_same(sides, 1)
    assert layers["helper"] == 0 < layers["worker"]
    for turn in range(2):
        before = dict(layers)
        with helper_process(sides.address, tmp_path, "--host-cores", "0") as helper:
            wait_until(lambda: sides.helped.listener.channel)
            compare() if turn == 0 else check_same(sides, 2)
            assert layers["helper"] > before.get("helper", 0)
            assert layers["worker"] == before["worker"]
            helper.send_signal(signal.SIGTERM)
            assert helper.wait(60) == 0
        wait_until(lambda: sides.helped.listener.channel is None)
        check_same(sides, 3)
    assert layers["late"] == 0


@pytest.mark.sampled(2)
def test_a_helper_that_is_killed_amid_a_layer(sides: Sides, tmp_path: Path) -> None:
    """Whoever waits for a killed helper learns of its end, however patient, and computes the layer himself."""
    with helper_process(sides.address, tmp_path, "--slowdown", "100") as helper:
        wait_until(lambda: sides.helped.listener.channel)
        check_same(sides, 1, helper.kill)
        wait_until(lambda: sides.helped.listener.channel is None)
        assert sides.helped.layers["late"] > 0
        check_same(sides, 2)
    with helper_process(sides.address, tmp_path):
        wait_until(lambda: sides.helped.listener.channel)
        before = sides.helped.layers["helper"]
        check_same(sides, 3)
        assert sides.helped.layers["helper"] > before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_helper_attends_to_fronts(
    address: HelperAddress, dtype: torch.dtype, tmp_path: Path
) -> None:
    """What comes back has the bits of this process' own, also after a helper is killed amid a layer.

    No page is written. A helper on another machine attends to none, and is not asked.
    """
    local = address.kind == "unix"
    with two_sides(address, dtype, windowed=False) as sides:
        layers = sides.helped.layers
        with helper_process(address, tmp_path, "--slowdown", "100") as helper:
            wait_until(lambda: sides.helped.listener.channel)
            check_fronts(sides, 1)
            assert (layers["helper"] > 0) == local
            check_same(sides, 2, groups=1)
            check_fronts(sides, 3, helper.kill)
            wait_until(lambda: sides.helped.listener.channel is None)
            assert (layers["late"] > 0) == local
        check_fronts(sides, 4)
        with helper_process(address, tmp_path):
            wait_until(lambda: sides.helped.listener.channel)
            before = layers["helper"]
            check_fronts(sides, 5)
            assert (layers["helper"] > before) == local


@pytest.mark.sampled(2)
def test_a_helper_that_stands_still(sides: Sides, tmp_path: Path) -> None:
    """A stopped helper delays one layer by the patience and gets nothing more; once it goes on it attends again."""
    with helper_process(sides.address, tmp_path) as helper:
        wait_until(lambda: sides.helped.listener.channel)
        check_same(sides, 1)
        sides.helped.patience_s = 0.05
        helper.send_signal(signal.SIGSTOP)
        for seed in range(2, 6):
            check_same(sides, seed)
        late = sides.helped.layers["late"]
        assert late > 0
        check_same(sides, 6)
        assert sides.helped.layers["late"] == late
        helper.send_signal(signal.SIGCONT)
        sides.helped.patience_s = NEVER_S
        before = sides.helped.layers["helper"]

        def attended() -> bool:
            check_same(sides, 7)
            return sides.helped.layers["helper"] > before

        wait_until(attended)


@pytest.mark.sampled(2)
def test_a_slow_helper(sides: Sides, tmp_path: Path) -> None:
    """What a helper does too late is dropped, also where it is still busy when the next step begins."""
    sides.helped.patience_s = -NEVER_S
    with helper_process(sides.address, tmp_path, "--slowdown", "10"):
        wait_until(lambda: sides.helped.listener.channel)
        for seed in range(30):
            check_same(sides, seed)
    assert sides.helped.layers["late"] > 0


@pytest.mark.parametrize("address", ["unix"], indirect=True)
@pytest.mark.parametrize("sides", [torch.float32], indirect=True)
def test_who_is_refused(sides: Sides, tmp_path: Path) -> None:
    """A helper of another build or version, a second one, and one where a side finds no memory attach to nothing."""
    library = load_channel()
    assert library is not None
    other = ChannelLibrary(library.functions, "0" * 32)
    with pytest.raises(ConfigError, match="native library is 0000"):
        HostHelper(str(sides.address.path), other)
    connection = handshake.new_socket()
    connection.connect(str(sides.address.path))
    handshake.send(connection, handshake.HelperHello(99, library.digest, 1))
    assert "version 99" in handshake.receive(connection, handshake.HelperWelcome)[0].refusal
    connection.close()
    limited = (
        "import resource, sys; from engine.host.channel import load_channel; from engine.host.helper import HostHelper;"
        "library = load_channel(); used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), {resource.RLIM_INFINITY}));"
        "HostHelper(sys.argv[1], library)"
    )
    short = subprocess.run(
        [sys.executable, "-c", limited, str(sides.address.path)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert b"Cannot allocate memory" in short.stderr
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # less than slots take
    try:
        with pytest.raises(ConnectionError):
            HostHelper(str(sides.address.path), library)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_same(sides, 1)
    assert sides.helped.layers["helper"] == 0
    with helper_process(sides.address, tmp_path):
        wait_until(lambda: sides.helped.listener.channel)
        with pytest.raises(ConfigError, match="another helper is attached"):
            HostHelper(str(sides.address.path), library)
        check_same(sides, 2)
    assert sides.helped.layers["helper"] > 0


@pytest.mark.parametrize("sides", [torch.bfloat16], indirect=True)
def test_what_a_slot_has_no_room_for(sides: Sides, tmp_path: Path) -> None:
    """More rows than a slot holds are attended by the worker, as is a step without memory for a helper."""
    shared = list(range(PAGES))
    many = [StepRows([PAGE * PAGES - 1], [shared, shared])] * (2 * ROWS + 2)
    with helper_process(sides.address, tmp_path):
        wait_until(lambda: sides.helped.listener.channel)
        ours, alone = (step(side, many, 1) for side in (sides.ours, sides.alone))
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
        assert sides.helped.layers["helper"] == 0
        check_same(sides, 2)
        assert sides.helped.layers["helper"] > 0


def test_pages_are_for_reading_only() -> None:
    """Another process can map a sealed segment for reading only, and nobody changes its size."""
    segment = MemorySegment(1)
    segment.memory[5] = 7
    segment.seal(read_only=True)
    assert attach(segment.file, segment.size, writable=False)[5] == 7
    with pytest.raises(PermissionError):
        attach(segment.file, segment.size, writable=True)
    with pytest.raises(PermissionError), open(segment.file, "r+b", closefd=False) as file:
        file.truncate(0)
    segment.memory[5] = 8
    with pytest.raises(ValueError, match="do not fit"):
        segment.take(segment.size + 1)
