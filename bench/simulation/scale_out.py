"""The latency of a search over many machines: that of the slowest, and of a tree of messages there and back.

As in chapter 6 of the thesis arXiv 2508.08469, whose constants of LogGP these are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Seconds: of the wire, of a message at either end, of a byte, and of merging two results.
LATENCY_S, OVERHEAD_S, BYTE_S, MERGE_S = 6.0e-6, 4.7e-6, 0.73e-9, 1.0e-6


def network_s(machines: int, query_bytes: int, result_bytes: int) -> float:
    """Return the seconds in which a query reaches all machines of a binary tree, and their results come together."""
    levels = math.ceil(math.log2(machines)) if machines > 1 else 0
    hop_s = LATENCY_S + 2 * OVERHEAD_S
    return levels * (2 * hop_s + (query_bytes + result_bytes) * BYTE_S + MERGE_S)


def over_machines(
    seconds: Sequence[float], machines: int, *, draws: int, seed: int, network: float = 0.0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Draw latencies of searches over so many machines, each as quick as one whose seconds were recorded."""
    recorded = np.asarray(seconds, np.float64)
    # The largest of n draws is the quantile that the n-th root of a uniform number gives.
    rank = np.random.default_rng(seed).random(draws) ** (1.0 / machines)
    found: np.ndarray[Any, np.dtype[np.float64]] = np.quantile(recorded, rank) + network
    return found
