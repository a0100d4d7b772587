"""The CUDA kernels for rows and for copies of pages, in Triton's interpreter, beside torch's own operations."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.pages.identity import PAGE
from engine.kernels.page_memory import PageMemory
from engine.models.decoders import rotary
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.torch_decoder import rms_norm
from tests.support.kernels import triton_kernels

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "head_dim": 24,
}  # fmt: skip
TYPES = st.sampled_from((torch.float32, torch.bfloat16))


def _kernels(name: str) -> ModuleType:
    found = triton_kernels(name)
    if found is None:
        pytest.skip("Triton is not installed (make setup-full)")
    return found


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Sums may be in another order; and Triton's interpreter cuts numbers to bf16, where a device rounds them."""
    exact = expected.dtype == torch.float32
    rtol, atol = (1e-5, 1e-6) if exact else (2**-6, 2**-5)
    return torch.allclose(found.float(), expected.float(), rtol=rtol, atol=atol)


@given(
    st.integers(0, 2**31), TYPES, st.integers(1, 5), st.sampled_from((8, 24, 100)), st.booleans()
)
def test_norm(seed: int, dtype: torch.dtype, count: int, size: int, before: bool) -> None:
    """Whole rows, and heads that lie inside of longer rows, in both orders of rounding."""
    kernels = _kernels("triton_rows")
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, generator=draw).to(dtype)
    whole = torch.randn(count, size, generator=draw).to(dtype)
    heads = torch.randn(count, 7, size, generator=draw).to(dtype)[:, 2:5]
    for rows in (whole, heads):
        offset = 0.0 if before else 1.0
        found, expected = (
            norm(rows, weight, epsilon=1e-5, offset=offset, rounds_before=before)
            for norm in (kernels.rms_norm, rms_norm)
        )
        assert found.is_contiguous()
        assert _close(found, expected)


@given(st.integers(0, 2**31), TYPES, st.integers(1, 5), st.sampled_from((8, 16, 24)))
def test_rotation(seed: int, dtype: torch.dtype, count: int, turned: int) -> None:
    """Heads inside of longer rows, all of their dimensions rotated or a part."""
    kernels = _kernels("triton_rows")
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 6, 24, generator=draw).to(dtype)[:, 1:4]
    positions = torch.randint(0, 500, (count,), generator=draw)
    inverse = torch.rand(turned // 2, generator=draw)
    angles = rotary.angles(positions, inverse, 1.0, dtype)
    assert _close(kernels.rotate(rows, angles), rotary.rotate(rows, angles))


@given(st.integers(0, 2**31), TYPES, st.integers(1, 9), st.integers(0, 2))
def test_written_pages(seed: int, dtype: torch.dtype, count: int, layer: int) -> None:
    """Keys and values of heads inside of longer rows lie where torch puts them, and nothing else changes."""
    kernels = _kernels("triton_rows")
    ours, theirs = _pool(dtype), _pool(dtype)
    draw = torch.Generator().manual_seed(seed)
    joined = torch.randn(count, 8, 24, generator=draw).to(dtype)
    places = torch.randperm(5 * PAGE, generator=draw)[:count]
    slots = ours.slots(places // PAGE, places % PAGE)
    kernels.write_pages(ours, layer, slots, joined[:, 4:6], joined[:, 6:])
    theirs.write(layer, slots, joined[:, 4:6], joined[:, 6:])
    assert torch.equal(ours.data, theirs.data)


@given(st.integers(0, 2**31), TYPES, st.integers(1, 5), st.integers(0, 2))
def test_copied_pages(seed: int, dtype: torch.dtype, count: int, layer: int) -> None:
    """Pages that are gathered from a pool and scattered into another are those, and no other changes."""
    kernels = _kernels("triton_pages")
    source, target = _pool(dtype), _pool(dtype)
    draw = torch.Generator().manual_seed(seed)
    source.data.copy_(torch.randn(source.data.shape, generator=draw))
    sources, targets = (torch.randperm(5, generator=draw)[:count] for _ in range(2))
    found = torch.empty((count, *source.data.shape[2:]), dtype=dtype)
    kernels.gather(source.data, sources, layer, found)
    kernels.scatter(target.data, targets, 2 - layer, found)
    assert torch.equal(found, source.data[sources, layer])
    expected = torch.zeros_like(target.data)
    expected[targets, 2 - layer] = source.data[sources, layer]
    assert torch.equal(target.data, expected)


def _pool(dtype: torch.dtype) -> PageMemory:
    spec = parse_decoder(CONFIG, where="config.json")
    return PageMemory(spec, None, [0, 1, 2], 5, dtype=dtype, device=torch.device("cpu"))
