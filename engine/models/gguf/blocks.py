"""The dequantisation of weights, block by block, in the arithmetic of ggml's `dequantize_row_*`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.models.gguf.reader import TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# The offsets of fp16 scales in a block.
_SCALES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
# The values of the codes of IQ4_NL and IQ4_XS.
_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)


def dequantised(kind: str, rows: Bytes) -> Floats:
    """Return fp32 (outputs, inputs) from a file's rows of bytes, (outputs, bytes)."""
    if kind == "F32":
        return rows.view(np.float32)
    if kind == "F16":
        return rows.view(np.float16).astype(np.float32)
    if kind == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = rows.reshape(-1, TYPES[kind].bytes)
    return _NUMBERS[kind](blocks).reshape(len(rows), -1)


def finite(kind: str, rows: Bytes) -> bool:
    """True if no number is infinite or NaN; in quantised weights only scales can be."""
    if kind in _SCALES:
        blocks = rows.reshape(-1, TYPES[kind].bytes)
        return all(np.isfinite(_half(blocks, at)).all() for at in _SCALES[kind])
    return bool(np.isfinite(dequantised(kind, rows)).all())


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return (…, 2, bytes): the low half of each byte, then the high half of each byte."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _codes(blocks: Bytes, at: int) -> Bytes:
    """Return (blocks, 32) four-bit codes that begin at byte `at`; the first 16 are in the bytes' low halves."""
    return _nibbles(blocks[:, at : at + 16]).reshape(-1, 32)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Return (blocks, 32): the fifth bits of five-bit codes, which begin at byte `at`."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, dtype=np.uint8)


def _q4_0(blocks: Bytes) -> Floats:
    codes = _codes(blocks, 2).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * codes.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _codes(blocks, 4).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = (_codes(blocks, 6) | _fifth_bits(blocks, 2)).astype(np.int8) - np.int8(16)
    return _half(blocks, 0) * codes.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _codes(blocks, 8) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _VALUES[_codes(blocks, 2)]


def _iq4_xs(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, 4:8]).swapaxes(1, 2).reshape(-1, 8)
    high = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    scales = (low | high.reshape(-1, 8) << 4).astype(np.int8) - np.int8(32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)
    return (_half(blocks, 0) * scales.astype(np.float32))[..., None] * _VALUES[codes]


def _by_six_bits(blocks: Bytes, codes: Bytes) -> Floats:
    """Return the numbers of (blocks, 8, 32) codes; six-bit scales and minima follow the fp16 scale and minimum."""
    low, high, mixed = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate((low & 63, mixed & 15 | low >> 6 << 4), axis=1).astype(np.float32)
    minima = np.concatenate((high & 63, mixed >> 4 | high >> 6 << 4), axis=1).astype(np.float32)
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scales[..., None] * codes.astype(np.float32) - minima[..., None]


def _q4_k(blocks: Bytes) -> Floats:
    return _by_six_bits(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifths = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _by_six_bits(blocks, codes | np.left_shift(fifths, 4, dtype=np.uint8))


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (low | (pairs & 3).reshape(-1, 8, 32) << 4).astype(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales[..., None] * codes.reshape(-1, 16, 16).astype(np.float32)


_NUMBERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
