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
    """Return the weights as rounded, int8 to 127ths of a group's largest; int4 has tests of its own."""
    if kind != "int8":
        return weight.to(torch.bfloat16).double() if kind == "bf16" else weight.double()
    groups = _grouped(weight)
    scale = (groups.abs().amax(2, keepdim=True) / 127).to(torch.bfloat16).float()
    codes = (groups / scale.where(scale != 0, 1)).round().clamp(-127, 127)
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
    packed = PackedLinear(KERNELS[-1], weight, kind, threads=2).numbers()
    if kind != "int4":
        assert torch.equal(packed.double(), _weights(weight, kind))
    expected = _inputs(x, kind) @ packed.double().T

    for kernels in KERNELS:
        linear = PackedLinear(kernels, weight, kind, threads=2)
        assert torch.equal(linear.numbers(), packed)
        found = linear(x)
        assert torch.allclose(found.double(), expected, atol=1e-4 * inputs**0.5, rtol=1e-4)
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(linear(x[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_many_inputs_and_rows(kind: WeightKind) -> None:
    """Tiles larger than a cache are computed in parts, and the sums go on from part to part."""
    torch.manual_seed(1)
    weight, x = torch.randn(130, 9000).to(torch.bfloat16), torch.randn(50, 9000)

    for kernels in KERNELS:
        linear = PackedLinear(kernels, weight, kind, threads=2)
        expected = _inputs(x, kind) @ linear.numbers().double().T
        found = linear(x)
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
            assert found[1, 3] == pytest.approx(192.0, rel=1 / 127)
            assert found[1, :3].abs().max() < 1e-30  # int4: (1 - 1) times the least scale


# What ggml's quantizer to Q4_K loses of such weights, rms relative to theirs: 4.5 bits, too (`spillway bench X2`).
_DRAWN = {
    "Gaussian": (torch.distributions.Normal(0.0, 1.0), 0.0713),
    "Laplace": (torch.distributions.Laplace(0.0, 1.0), 0.0847),
    "Student, 5": (torch.distributions.StudentT(5.0), 0.0832),
}


@pytest.mark.parametrize("name", _DRAWN)
def test_int4_loses_less_than_q4_k(name: str) -> None:
    """Weights with short and long tails lose less than in llama.cpp's format of as many bits, wherever they lie."""
    torch.manual_seed(1)
    of, q4_k = _DRAWN[name]
    weight = of.sample((64, 2048))
    for scale in (1.0, 1e-3, 1e3):
        found = PackedLinear(KERNELS[0], weight * scale, "int4", threads=1).numbers() / scale
        assert float((found - weight).norm() / weight.norm()) <= q4_k * 0.97


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1 << 30), st.floats(-12.0, 12.0), st.floats(-60.0, 60.0), st.sampled_from((1.0, 1e-20, 1e20)),
)  # fmt: skip
def test_int4_of_odd_weights(seed: int, decades: float, mean: float, scale: float) -> None:
    """Groups far from zero, or smaller than their row's largest: no weight is farther off than its group bears."""
    torch.manual_seed(seed)
    weight = torch.randn(3, 8, 32)
    weight[:, 1:4] = (weight[:, 1:4] + mean) * 10.0**-decades
    weight[0, 2] = 0.0
    weight[1, 2] = 0.5
    weight[2, 3, 0] *= 100

    found = PackedLinear(KERNELS[0], weight.flatten(1) * scale, "int4", threads=1).numbers() / scale

    off = (found.view(weight.shape) - weight).abs().amax(2)
    range_, most = weight.amax(2) - weight.amin(2), weight.abs().amax(2)
    # Values are up to 24 scales apart; the least scale is 128 times smaller than that of the row's largest group.
    least = most.amax(1, keepdim=True) / 120 / 128 * 12
    assert (off <= 0.2 * range_ + most / 10 + least).all()
    assert (found.view(weight.shape)[0, 2] == 0).all()
