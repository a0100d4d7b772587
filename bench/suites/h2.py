"""H2: the product's own case, one machine under chat, embeddings, search and ingest at once, against three servers.

Goodput is the load at which 99 % of the requests of every kind still meet their objective. A sum over kinds would let
a product that starves chat win by the many cheap searches; one number for the worst kind is what a buyer plans by.
Between two measured load factors the share is interpolated, so that the ladder's steps do not decide.
"""

from __future__ import annotations

from bench.workloads.mixed_load import OBJECTIVES, SHAPE

LEVEL = 0.99  # of every kind: the share that must meet its objective
FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)  # of SHAPE's rates
OVER = 0.9  # a share below this ends the climb: what comes next is overload
HOLD_S, WARM_S = (
    120.0,
    10.0,
)  # a factor is held so long; requests due in the first seconds do not count
ROUNDS = 5  # climbs of both sides in turns, each with other arrivals
SWEEP_S = 40.0  # a hold while divisions of the cores are tried
MODEL, KIND = "M", "bf16"
GOAL, MUST = 1.5, 1.0

__all__ = ["OBJECTIVES", "SHAPE"]
