"""The channel to a helper process: the same bits whatever becomes of the helper; one of another build is refused."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench import ROOT
from bench.engine.helper_process import helper_process, wait_until
from common.errors import ConfigError
from common.pages.identity import PAGE
from common.transport.memory_segment import MemorySegment, attach
from engine.decoder.executor.host_attention import HostAttention, HostAttentionThread
from engine.decoder.executor.torch_executor import StepRows
from engine.host import handshake
from engine.host.channel import ChannelLibrary, load_channel
from engine.host.helped_attention import ROWS, HelpedAttention, helped
from engine.host.helper import HostHelper
from engine.kernels.page_memory import PageMemory, segment_bytes
from engine.models.decoders.compiled_decoder import load_kernels
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec

PAGES, LAYERS, HEADS, KV_HEADS, DIM = 40, 3, 6, 2, 24
NEVER_S = 3600.0
pytestmark = pytest.mark.skipif(
    load_kernels() is None or load_channel() is None, reason="no compiler for the kernels"
)


def _spec() -> DecoderSpec:
    """Return a model whose middle layer has a window, so that pages lie in two groups; its scores are capped."""
    config = {
        "model_type": "gemma2", "hidden_size": HEADS * DIM, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "num_hidden_layers": LAYERS, "intermediate_size": 1,
        "vocab_size": 1, "max_position_embeddings": 2048, "sliding_window": 50, "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 5.0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    return parse_decoder(config, where="test")


class Side(NamedTuple):
    """Attention over pages of its own."""

    attention: HostAttention
    pools: list[PageMemory]


class Sides(NamedTuple):
    """The same pages twice: attended with the help of who attaches at `socket`, and by this process alone."""

    ours: Side
    alone: Side
    socket: Path

    @property
    def helped(self) -> HelpedAttention:
        assert isinstance(self.ours.attention, HelpedAttention)
        return self.ours.attention


def _pools(segment: MemorySegment | None, dtype: torch.dtype) -> list[PageMemory]:
    spec, cpu = _spec(), torch.device("cpu")
    pools = [
        PageMemory(spec, window, layers, PAGES, dtype=dtype, device=cpu, segment=segment, packed=True)
        for window, layers in spec.groups
    ]  # fmt: skip
    for pool in pools:
        pool.data.copy_(
            torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(len(pool.layers)))
        )
    return pools


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sides]:
    kernels, dtype, spec = load_kernels(), request.param, _spec()
    assert kernels is not None
    segment = MemorySegment(segment_bytes(spec, PAGES, dtype))
    ours, alone = _pools(segment, dtype), _pools(None, dtype)
    socket = tmp_path / "host.sock"
    own = HostAttentionThread(kernels, spec, ours)
    made = helped(own, str(socket), spec, ours, segment, threads=1)
    made.patience_s = NEVER_S
    found = Sides(Side(made, ours), Side(HostAttentionThread(kernels, spec, alone), alone), socket)
    yield found
    found.alone.attention.close()
    made.close()


def _step(side: Side, queries: list[StepRows], seed: int, disturb: object = None) -> list[Tensor]:
    """Attend with two sub-batches in flight in all layers; return every result. `disturb` is called amid."""
    halves = [half for half in (queries[::2], queries[1::2]) if half]
    batches = [side.attention.plan(half) for half in halves]
    draw = torch.Generator().manual_seed(seed)
    results = []
    for group, pool in enumerate(side.pools):
        for at in range(len(pool.layers)):
            flights = []
            for batch, half in zip(batches, halves, strict=True):
                joined = torch.randn(len(half), HEADS + 2 * KV_HEADS, DIM, generator=draw)
                out = torch.empty(len(half), HEADS, DIM)
                flights.append((batch.submit(group, at, joined, out), joined, out))
            if callable(disturb):
                disturb()
            for waits, _, out in flights:
                waits.wait()
                results.append(out)
    return results


def _queries(lengths: list[int], seed: int) -> list[StepRows]:
    """Return a decoding row of each sequence at the end of its context, on pages drawn without repetition."""
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for length in lengths:
        count = -(-length // PAGE)
        mine, order = order[:count], order[count:]
        found.append(StepRows([length - 1], [mine, mine]))
    return found


def _same(
    sides: Sides, seed: int, disturb: object = None, lengths: tuple[int, ...] = (70, 300, 1, 33)
) -> None:
    """Attend on both sides, and compare the bits of results and pages."""
    queries = _queries(list(lengths), seed)
    ours = _step(sides.ours, queries, seed, disturb)
    alone = _step(sides.alone, queries, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    for mine, theirs in zip(sides.ours.pools, sides.alone.pools, strict=True):
        assert torch.equal(mine.data, theirs.data)


def test_a_helper_attends(sides: Sides, tmp_path: Path) -> None:
    """Random steps: the same bits without a helper, with one, after it has left, and with the next one."""
    layers = sides.helped.layers

    @given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(0, 1 << 30))
    def compare(lengths: list[int], seed: int) -> None:
        _same(sides, seed, lengths=tuple(lengths))

    _same(sides, 1)
    assert layers["helper"] == 0 < layers["worker"]
    for turn in range(2):
        before = dict(layers)
        with helper_process(sides.socket, tmp_path, "--host-cores", "0") as helper:
            wait_until(lambda: sides.helped.listener.channel)
            compare() if turn == 0 else _same(sides, 2)
            assert layers["helper"] > before.get("helper", 0)
            assert layers["worker"] == before["worker"]
            helper.send_signal(signal.SIGTERM)
            assert helper.wait(60) == 0
        wait_until(lambda: sides.helped.listener.channel is None)
        _same(sides, 3)
    assert layers["late"] == 0


def test_a_helper_that_is_killed_amid_a_layer(sides: Sides, tmp_path: Path) -> None:
    """Whoever waits for a killed helper learns of its end, however patient, and computes the layer himself."""
    with helper_process(sides.socket, tmp_path, "--slowdown", "100") as helper:
        wait_until(lambda: sides.helped.listener.channel)
        _same(sides, 1, helper.kill)
        wait_until(lambda: sides.helped.listener.channel is None)
        assert sides.helped.layers["late"] > 0
        _same(sides, 2)
    with helper_process(sides.socket, tmp_path):
        wait_until(lambda: sides.helped.listener.channel)
        before = sides.helped.layers["helper"]
        _same(sides, 3)
        assert sides.helped.layers["helper"] > before


def test_a_helper_that_stands_still(sides: Sides, tmp_path: Path) -> None:
    """A stopped helper delays one layer by the patience and gets nothing more; once it goes on it attends again."""
    with helper_process(sides.socket, tmp_path) as helper:
        wait_until(lambda: sides.helped.listener.channel)
        _same(sides, 1)
        sides.helped.patience_s = 0.05
        helper.send_signal(signal.SIGSTOP)
        for seed in range(2, 6):
            _same(sides, seed)
        late = sides.helped.layers["late"]
        assert late > 0
        _same(sides, 6)
        assert sides.helped.layers["late"] == late
        helper.send_signal(signal.SIGCONT)
        sides.helped.patience_s = NEVER_S
        before = sides.helped.layers["helper"]

        def attended() -> bool:
            _same(sides, 7)
            return sides.helped.layers["helper"] > before

        wait_until(attended)


def test_a_slow_helper(sides: Sides, tmp_path: Path) -> None:
    """What a helper does too late is dropped, also where it is still busy when the next step begins."""
    sides.helped.patience_s = -NEVER_S
    with helper_process(sides.socket, tmp_path, "--slowdown", "10"):
        wait_until(lambda: sides.helped.listener.channel)
        for seed in range(30):
            _same(sides, seed)
    assert sides.helped.layers["late"] > 0


@pytest.mark.parametrize("sides", [torch.float32], indirect=True)
def test_who_is_refused(sides: Sides, tmp_path: Path) -> None:
    """A helper of another build or version, a second one, and one where a side finds no memory attach to nothing."""
    library = load_channel()
    assert library is not None
    other = ChannelLibrary(library.functions, "0" * 32)
    with pytest.raises(ConfigError, match="native library is 0000"):
        HostHelper(str(sides.socket), other)
    connection = handshake.new_socket()
    connection.connect(str(sides.socket))
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
        [sys.executable, "-c", limited, str(sides.socket)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert b"Cannot allocate memory" in short.stderr
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # less than slots take
    try:
        with pytest.raises(ConnectionError):
            HostHelper(str(sides.socket), library)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _same(sides, 1)
    assert sides.helped.layers["helper"] == 0
    with helper_process(sides.socket, tmp_path):
        wait_until(lambda: sides.helped.listener.channel)
        with pytest.raises(ConfigError, match="another helper is attached"):
            HostHelper(str(sides.socket), library)
        _same(sides, 2)
    assert sides.helped.layers["helper"] > 0


@pytest.mark.parametrize("sides", [torch.bfloat16], indirect=True)
def test_what_a_slot_has_no_room_for(sides: Sides, tmp_path: Path) -> None:
    """More rows than a slot holds are attended by the worker, as is a step without memory for a helper."""
    shared = list(range(PAGES))
    many = [StepRows([PAGE * PAGES - 1], [shared, shared])] * (2 * ROWS + 2)
    with helper_process(sides.socket, tmp_path):
        wait_until(lambda: sides.helped.listener.channel)
        ours, alone = (_step(side, many, 1) for side in (sides.ours, sides.alone))
        assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
        assert sides.helped.layers["helper"] == 0
        _same(sides, 2)
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
