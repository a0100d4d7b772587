"""The page copier: pages below the host have one layout, whatever lies in the tiers above."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

from common.pages import codec
from common.pages.identity import PAGE
from common.pages.keys import PageKey
from common.transport.memory_segment import MemorySegment
from engine.decoder.executor.interface import PageMove
from engine.decoder.executor.page_copier import TorchPageCopier
from engine.kernels.page_arrival import PageArrival
from engine.kernels.page_memory import PageMemory, pack, segment_bytes
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec

LAYERS, DIM = 2, 8


def _spec() -> DecoderSpec:
    config = {
        "model_type": "llama", "hidden_size": 4 * DIM, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS, "intermediate_size": 1, "vocab_size": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    return parse_decoder(config, where="test")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
async def test_pages_below_the_host_are_packed(dtype: torch.dtype, packed: bool) -> None:
    """Pools of either layout write the same bytes and read them back; damage in the host's memory stays visible."""
    device, host = (
        PageMemory(
            _spec(), None, range(LAYERS), 4, dtype=dtype, device=torch.device("cpu"), packed=packed,
            segment=segment,
        )
        for segment in (None, MemorySegment(segment_bytes(_spec(), 4, dtype)))
    )  # fmt: skip
    copier = TorchPageCopier([device], [host], [(0, 0), (0, 1)], lambda: PageArrival(LAYERS))
    page = torch.randn(LAYERS, 2, 2, PAGE, DIM).to(dtype)
    here = pack(page) if packed else page
    layers = [bytes(np.asarray(layer.view(torch.uint8))) for layer in pack(page)]
    key = PageKey(id=bytes(range(16)), group=0)
    header = codec.Header(
        id=key.id, parent=bytes(16), depth=0, layers=LAYERS, layer_bytes=len(layers[0])
    )
    value = codec.encode(header, layers)
    device.data[2] = here

    assert await copier.fill([(key, 3, value)]) == {}

    assert torch.equal(host.data[3], here)
    assert await copier.value(header, "host", 3) == value
    assert await copier.value(header, "device", 2) == value
    host.raw()[3, 1, 5] ^= 1
    assert codec.check(await copier.value(header, "host", 3), key.id) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_a_plain_device_are_packed_on_the_host(dtype: torch.dtype) -> None:
    """A page that is saved to a pool of another layout and loaded again is the page that it was."""
    device, host = (
        PageMemory(
            _spec(), None, range(LAYERS), 4, dtype=dtype, device=torch.device("cpu"), packed=packed,
        )
        for packed in (False, True)
    )  # fmt: skip
    copier = TorchPageCopier([device], [host], [(0, 0), (0, 1)], lambda: PageArrival(LAYERS))
    page = torch.randn(LAYERS, 2, 2, PAGE, DIM).to(dtype)
    device.data[1] = page
    saved = threading.Event()

    copier.save(PageMove("save", 0, bytes(16), 1, 2), lambda _move, _sound: saved.set())
    assert saved.wait(60)
    loading = copier.load([PageMove("load", 0, bytes(16), 2, 3)])
    loading.wait()

    assert torch.equal(host.data[2], pack(page))
    assert torch.equal(device.data[3], page)
    assert not loading.unsound


def test_a_closed_copier_ends_what_it_was_given_and_lets_go_of_its_pages() -> None:
    """Its thread, which refers to all pages, ends after the last task."""
    device, host = (
        PageMemory(
            _spec(),
            None,
            range(LAYERS),
            4,
            dtype=torch.float32,
            device=torch.device("cpu"),
            packed=True,
        )
        for _ in range(2)
    )
    copier = TorchPageCopier([device], [host], [(0, 0), (0, 1)], lambda: PageArrival(LAYERS))
    freed, saved, going_on = threading.Event(), threading.Event(), threading.Event()
    weakref.finalize(host, freed.set)
    copier.save(PageMove("save", 0, bytes(16), 0, 0), lambda _move, _sound: going_on.wait(60))
    copier.save(PageMove("save", 0, bytes(16), 1, 1), lambda _move, _sound: saved.set())

    copier.close()
    going_on.set()
    del copier, device, host

    assert saved.wait(60)
    assert freed.wait(60)
