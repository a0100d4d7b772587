"""Figures that the thesis prints of PipeRAG (chapter 5), and of iterative retrieval in batches (figure 3.8b)."""

from __future__ import annotations

from typing import NamedTuple

from planner.pipelined_retrieval import SearchTimes, TokenTimes

TOKENS, INTERVAL = 1024, 64
INTERVALS = (8, 16, 32, 64)
# Table 5.3: seconds of a retrieval by nprobe.
SEARCHES = SearchTimes((
    (1, 0.02606), (2, 0.04812), (4, 0.09259), (8, 0.17843), (16, 0.34449), (32, 0.66643), (64, 1.29852),
    (128, 2.54444),
))  # fmt: skip
# Table 5.4: seconds of a token by segments of 128.
GENERATION = TokenTimes(
    (0.00724, 0.00729, 0.00771, 0.00834, 0.00931, 0.01047, 0.01184, 0.01319), 128
)


class PublishedAnswer(NamedTuple):
    """A corpus of table 5.1: seconds without retrieval, of RETRO and of PipeRAG with S3, and RETRO's nprobe.

    The thesis does not print that nprobe: it is the one with which the model comes nearest.
    """

    corpus: str
    alone_s: float
    retro_s: float
    piperag_s: float
    nprobe: int


TABLE_5_1 = (
    PublishedAnswer("Wikipedia", 9.35, 14.59, 10.34, 16),
    PublishedAnswer("RealNews", 9.35, 12.36, 10.58, 8),
    PublishedAnswer("C4", 9.35, 11.13, 10.58, 4),
)
# Figure 3.8b: steps a token, by batch of retrievals and decode batch.
FIGURE_3_8B: dict[tuple[int, int], float] = {
    (batch, sequences): steps
    for batch, cells in {
        256: {256: 3.08},
        128: {128: 2.94, 256: 1.38},
        64: {64: 2.77, 128: 1.38, 256: 1.15},
        16: {16: 2.34, 64: 1.14, 128: 1.06, 256: 1.03},
        8: {8: 2.05, 16: 1.32, 64: 1.06, 128: 1.03, 256: 1.01},
        4: {4: 1.71, 8: 1.26, 16: 1.11, 64: 1.02, 128: 1.01, 256: 1.01},
        2: {4: 1.16, 8: 1.07, 16: 1.03, 64: 1.01, 128: 1.00, 256: 1.00},
        1: {4: 1.00, 8: 1.00, 16: 1.00, 64: 1.00, 128: 1.00, 256: 1.00},
    }.items()
    for sequences, steps in cells.items()
}
