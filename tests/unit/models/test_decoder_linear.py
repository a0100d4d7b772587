"""Packed linears against what they say they compute, in every build: any shape and kind, the same bits always."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.decoders.compiled_decoder import PackedLinear, WeightKind
from tests.support.kernels import decoder_kernels

KERNELS = decoder_kernels()
GROUP = 32


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """Return (rows, groups, GROUP), padded with zeros."""
    rows, size = values.shape
    return torch.nn.functional.pad(values, (0, -size % GROUP)).view(rows, -1, GROUP)


def _weights(weight: torch.Tensor, kind: WeightKind) -> torch.Tensor:
    """Return the weights as rounded: int8 to 127ths of a group's largest, int4 to 8ths of it."""
    if kind in {"fp32", "bf16"}:
        return weight.to(torch.bfloat16).double() if kind == "bf16" else weight.double()
    groups = _grouped(weight)
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (most.abs() / 127 if kind == "int8" else most / -8).to(torch.bfloat16).float()
    least, largest = (-127, 127) if kind == "int8" else (-8, 7)
    codes = (groups / scale.where(scale != 0, 1)).round().clamp(least, largest)
    return (codes * scale).double().flatten(1)[:, : weight.shape[1]]


def _inputs(rows: torch.Tensor, kind: WeightKind) -> torch.Tensor:
    """Return the inputs as rounded: to bf16, or to 127ths of a group's largest."""
    if kind in {"fp32", "bf16"}:
        return rows.to(torch.bfloat16).double() if kind == "bf16" else rows.double()
    groups = _grouped(rows)
    scale = groups.abs().amax(2, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return ((groups * inverse).round() * scale).double().flatten(1)[:, : rows.shape[1]]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 300),
    st.integers(1, 40),
    st.sampled_from(("fp32", "bf16", "int8", "int4")),
    st.integers(0, 1 << 30),
)
def test_any_shape(outputs: int, inputs: int, rows: int, kind: WeightKind, seed: int) -> None:
    """Each build gives the product of what was rounded, and a row alone has the bits it has among others."""
    torch.manual_seed(seed)
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    expected = _inputs(x, kind) @ _weights(weight, kind).T

    for kernels in KERNELS:
        linear = PackedLinear(kernels, weight, kind, threads=2)
        found = linear(x)
        assert torch.allclose(found.double(), expected, atol=1e-4 * inputs**0.5, rtol=1e-4)
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(linear(x[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_many_inputs_and_rows(kind: WeightKind) -> None:
    """Tiles larger than a cache are computed in parts, and the sums go on from part to part."""
    torch.manual_seed(1)
    weight, x = torch.randn(130, 9000).to(torch.bfloat16), torch.randn(50, 9000)
    expected = _inputs(x, kind) @ _weights(weight.float(), kind).T

    for kernels in KERNELS:
        found = PackedLinear(kernels, weight, kind, threads=2)(x)
        assert (found.double() - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_zeros_and_stored_halves() -> None:
    """Groups of zeros have no scale; weights stored in bf16 are packed as they are."""
    weight = torch.zeros(70, 128)
    weight[3, 64:] = 1.5
    x = torch.zeros(2, 128)
    x[1] = 2.0
    for kernels in KERNELS:
        for kind in ("fp32", "bf16", "int8", "int4"):
            found = PackedLinear(kernels, weight.to(torch.bfloat16), kind, threads=1)(x)
            assert found[0].abs().max() == 0
            assert found[1, 3] == pytest.approx(192.0, rel=0.5 / 127)  # half a step of int8
            assert found[1, :3].abs().max() == 0
