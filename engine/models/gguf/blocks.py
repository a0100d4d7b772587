"""Quantised weights as numbers, in the arithmetic of ggml's `dequantize_row_*`; one block after another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.models.gguf.reader import TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
}  # where fp16 scales lie in a block


def dequantised(kind: str, rows: Bytes) -> Floats:
    """Return fp32 (outputs, inputs) of rows as a file stores them, (outputs, bytes)."""
    if kind == "F32":
        return rows.view(np.float32)
    if kind == "F16":
        return rows.view(np.float16).astype(np.float32)
    if kind == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = rows.reshape(-1, TYPES[kind].bytes)
    return _NUMBERS[kind](blocks).reshape(len(rows), -1)


def finite(kind: str, rows: Bytes) -> bool:
    """True if no number is infinite or NaN: of quantised weights, no scale."""
    if kind in _SCALES:
        blocks = rows.reshape(-1, TYPES[kind].bytes)
        return all(np.isfinite(_half(blocks, at)).all() for at in _SCALES[kind])
    return bool(np.isfinite(dequantised(kind, rows)).all())


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return (…, 2, bytes): the low halves of bytes, then the high ones."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * codes.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    low, high, mixed = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=1).astype(np.float32)
    minima = np.concatenate((high & 63, mixed >> 4 | high >> 6 << 4), axis=1).astype(np.float32)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scales[..., None] * codes - minima[..., None]


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (low | (pairs & 3).reshape(-1, 8, 32) << 4).astype(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales[..., None] * codes.reshape(-1, 16, 16).astype(np.float32)


_NUMBERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
