"""Blocks of codes: the codes of 64 rows as scan_lists.cpp reads them, by their bits."""

from __future__ import annotations

import math

import numpy as np

from services.vector_search.index.quantizer import Bytes, CodeBits
from services.vector_search.index.rows import Ints

BLOCK = 64
# Where the bytes of a subspace hold the rows of a block: the kernel adds up even and odd bytes apart.
_PLACES = np.arange(BLOCK) % (BLOCK // 2) * 2 + np.arange(BLOCK) // (BLOCK // 2)
_NIBBLE = 4


def blocks_of(blocks: int, subspaces: int, bits: CodeBits) -> Bytes:
    """Return so many blocks whose codes are 0: of 8 bits (blocks, subspaces, 64), of 4 (blocks, subspaces / 8, 64, 4).

    Byte s of a row and of the e-th eight subspaces has subspace 8 e + s in its low half, 8 e + 4 + s in its high one.
    """
    if bits == 8:
        return _aligned((blocks, subspaces, BLOCK))
    return _aligned((blocks, subspaces // (2 * _NIBBLE), BLOCK, _NIBBLE))


def _aligned(shape: tuple[int, ...]) -> Bytes:
    """Return zeros from a multiple of 64 bytes on, so that the kernel's loads lie in one line of the cache each."""
    size = math.prod(shape)
    room = np.zeros(size + BLOCK, np.uint8)
    begin = -room.ctypes.data % BLOCK
    return room[begin : begin + size].reshape(shape)


def put(held: Bytes, block: Ints, slot: Ints, codes: Bytes) -> None:
    """Put codes (n, subspaces) into blocks at slots from 0 to 63."""
    if held.ndim == 3:
        held[block, :, _PLACES[slot]] = codes
        return
    halves = codes.reshape(len(codes), codes.shape[1] // (2 * _NIBBLE), 2, _NIBBLE)
    held[block, :, slot] = halves[:, :, 0] | halves[:, :, 1] << _NIBBLE


def taken(held: Bytes) -> Bytes:
    """Return the codes of every slot of blocks, (blocks, 64, subspaces)."""
    if held.ndim == 3:
        return held.transpose(0, 2, 1)[:, _PLACES]
    halves = np.stack([held & 0xF, held >> _NIBBLE], axis=3).transpose(0, 2, 1, 3, 4)
    return halves.reshape(len(held), BLOCK, held.shape[1] * 2 * _NIBBLE)
