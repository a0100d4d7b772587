"""What the thesis publishes of delayed-synchronization traversal: figures 7.4, 7.9 and 7.11, Deep10M with HNSW.

Rows are candidates a group (1 to 4), columns groups in flight (1 to 7). Jiang, "Vector-Centric Machine Learning
Systems" (2025), chapter 7.
"""

from __future__ import annotations

Surface = tuple[tuple[float, ...], ...]

HOPS: Surface = (
    (1.00, 1.08, 1.16, 1.24, 1.32, 1.40, 1.48),
    (1.07, 1.23, 1.39, 1.54, 1.70, 1.86, 2.01),
    (1.14, 1.38, 1.62, 1.85, 2.08, 2.32, 2.56),
    (1.21, 1.53, 1.84, 2.16, 2.47, 2.79, 3.12),
)
RECALL: Surface = (
    (94.11, 94.26, 94.40, 94.55, 94.63, 94.75, 94.86),
    (94.23, 94.53, 94.74, 94.94, 95.15, 95.33, 95.45),
    (94.36, 94.73, 95.05, 95.31, 95.50, 95.64, 95.79),
    (94.48, 94.93, 95.31, 95.54, 95.72, 95.89, 95.91),
)
WITHIN: Surface = (
    (1.00, 1.53, 1.81, 2.01, 2.17, 2.27, 2.31),
    (1.34, 1.89, 2.22, 2.44, 2.58, 2.62, 2.51),
    (1.49, 2.01, 2.33, 2.47, 2.41, 2.20, 2.02),
    (1.55, 2.04, 2.28, 2.31, 2.07, 1.85, 1.67),
)
ACROSS: Surface = (
    (1.00, 1.50, 1.82, 1.95, 1.92, 1.84, 1.76),
    (1.32, 1.80, 1.84, 1.69, 1.55, 1.43, 1.33),
    (1.45, 1.80, 1.62, 1.43, 1.28, 1.16, 1.06),
    (1.51, 1.68, 1.43, 1.24, 1.09, 0.97, 0.88),
)
# Best-first search with four units over one, and DST over best-first with 1, 2 and 4 units: SIFT10M, SPACEV10M.
UNITS_BEST_FIRST = 1.41
UNITS_DELAYED = {1: (1.78, 2.03), 2: (2.20, 2.49), 4: (2.44, 2.81)}
# Nodes visited in 8 sub-graphs over those in one graph at R@10 of 90 %, SPACEV.
SUBGRAPHS = 4.2
# Bits and hashes of a Bloom filter, and its false positives with 1,000 nodes.
FILTERS = {(32_768, 1): 0.030, (32_768, 3): 0.0007, (262_144, 3): 1 / 600_000}
