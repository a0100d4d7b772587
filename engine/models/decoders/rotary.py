"""Rotary positions as tensors: inverse frequencies, and the rotation of queries and keys.

The operations, their order and their precision (fp32) are those of transformers: at position 10,000 the last bit of a
frequency moves an angle by 1e-3, so even a more precise frequency would compute a different model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.decoders.rope import RopeSpec


def frequencies(rope: RopeSpec, dim: int, *, long: bool = False) -> Tensor:
    """Return the fp32 inverse frequencies of heads of `dim` numbers, in radians a position: one per rotated pair.

    `long` asks for the frequencies of texts beyond the short context, if the rotation has one.
    """
    dim = int(dim * rope.share)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind in {"longrope", "divided"}:
        factors = rope.long_factors if long and rope.long_factors else rope.factors
        return 1.0 / (torch.tensor(factors) * powers)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, powers, dim)
    return plain


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and blend in between."""
    length = 2 * math.pi / plain
    slow, fast = rope.original / rope.low, rope.original / rope.high
    scaled = torch.where(length > slow, plain / rope.factor, plain)
    smooth = (rope.original / length - rope.low) / (rope.high - rope.low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((length >= fast) & (length <= slow), blended, scaled)


def _yarn(rope: RopeSpec, powers: Tensor, dim: int) -> Tensor:
    """Blend scaled and plain frequencies along a ramp over the dimensions."""
    first, last = _turning(rope, rope.fast, dim), _turning(rope, rope.slow, dim)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _turning(rope: RopeSpec, rotations: float, dim: int) -> float:
    """Return the dimension, as a fraction, whose angle makes `rotations` turns over the original context."""
    ratio = math.log(rope.original / (rotations * 2 * math.pi))
    return dim * ratio / (2 * math.log(rope.theta))


def angles(positions: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines, (2, rows, 1, rotated dims), of `positions` (rows), scaled by `scale`, in `dtype`.

    `inverse` are the frequencies, the same for all rows or shaped (rows, frequencies).
    """
    rotation = positions.to(torch.float32)[:, None] * inverse
    rotation = torch.stack((rotation.cos(), rotation.sin()))
    rotation = (rotation if scale == 1 else rotation * scale).to(dtype)
    return torch.cat((rotation, rotation), dim=-1)[:, :, None, :]


def rotate(rows: Tensor, rotation: Tensor) -> Tensor:
    """Rotate (rows, heads, dim) by `angles`: dimension i pairs with i + half of the rotated ones; others stay."""
    turned = rotation.shape[-1]
    half = turned // 2
    turning, rest = rows[..., :turned], rows[..., turned:]
    swapped = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    found = turning * rotation[0] + swapped * rotation[1]
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found
