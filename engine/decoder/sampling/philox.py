"""Philox 4x32-10, a counter-based generator of random numbers: a pure function of a key and a counter.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). There is no stream of numbers, so a row's numbers
depend neither on the other rows of the batch, nor on the draws before a failover.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox(counters: Words, keys: Words) -> Words:
    """Return (rows, 4) words of 32 bits for counters (rows, 4) and keys (rows, 2) of such words."""
    a, b, c, d = counters.T
    first, second = keys.T
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # the products fit into 64 bits
        a, c = (right >> _HALF) ^ b ^ first, (left >> _HALF) ^ d ^ second
        b, d = right & _LOW, left & _LOW
        first, second = (first + _KEY_STEPS[0]) & _LOW, (second + _KEY_STEPS[1]) & _LOW
    return np.stack((a, b, c, d), axis=1)


def uniforms(keys: Sequence[tuple[int, int, int, int]]) -> NDArray[np.float64]:
    """Return one number in [0, 1), of 53 random bits, for each (seed, choice, position, draw)."""
    words = [
        (position & 0xFFFFFFFF, choice & 0xFFFFFFFF, draw & 0xFFFFFFFF, 0, seed)
        for seed, choice, position, draw in keys
    ]
    counters = np.array([row[:4] for row in words], dtype=np.uint64).reshape(-1, 4)
    seeds = np.array([row[4] & ((1 << 64) - 1) for row in words], dtype=np.uint64)
    drawn = philox(counters, np.stack((seeds & _LOW, seeds >> _HALF), axis=1))
    bits = (drawn[:, 0] << np.uint64(21)) | (drawn[:, 1] >> np.uint64(11))
    found: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return found
