"""The latency of a search that waits for the slowest of many nodes (Chameleon, section 4.6.2 and figure 4.7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeNetwork:
    """A network that sends a query down a binary tree of nodes and joins the answers on the way up (LogGP)."""

    hop_s: float = 10e-6
    bytes_per_s: float = 12.5e9  # 100 Gb/s

    def latency_s(self, nodes: int, query_bytes: int = 0, answer_bytes: int = 0) -> float:
        """Return the seconds of both ways."""
        depth = math.ceil(math.log2(nodes + 1))
        return depth * (2 * self.hop_s + (query_bytes + answer_bytes) / self.bytes_per_s)


def slowest_quantile(latencies_s: Sequence[float], nodes: int, quantile: float) -> float:
    """Return a quantile of the slowest of so many nodes, each as one node's latencies are distributed.

    The q-quantile of the maximum of N independent draws is the q^(1/N)-quantile of one draw: of 128 nodes the median
    is what one node exceeds once in 185 searches. No sample says more than its largest value (`is_known`).
    """
    ordered = sorted(latencies_s)
    place = math.ceil(len(ordered) * math.pow(quantile, 1 / nodes) - 1e-9)
    return ordered[min(max(place, 1), len(ordered)) - 1]


def is_known(count: int, nodes: int, quantile: float) -> bool:
    """Tell whether so many latencies of one node reach as far as a quantile of the slowest of `nodes`."""
    return count * (1 - math.pow(quantile, 1 / nodes)) >= 1


def scaled_quantile(
    latencies_s: Sequence[float], nodes: int, quantile: float, network: TreeNetwork
) -> float:
    """Return a quantile of the latency of a search over so many nodes, network included."""
    return slowest_quantile(latencies_s, nodes, quantile) + network.latency_s(nodes)
