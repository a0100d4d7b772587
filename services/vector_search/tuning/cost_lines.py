"""The cost of a search by its stages: lines through times that micro-benchmarks measured (section 4.5 of the thesis
arXiv 2508.08469 in software: seconds of a stage = a constant times its work).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec
import numpy as np

# Rows of a block of codes, which is always scored whole.
BLOCK = 64
# The stages of a search in lists, in the order of `ListsSearch.work`; the last two are those of codes of 4 bits.
STAGES = (
    "call", "OPQ", "IVFDist", "SelCells", "BuildLUT", "PQDist", "SelK", "rescore", "BuildLUT4", "PQDist4",
)  # fmt: skip
# Parts of them that grow together: what every search in the same lists does, each code, each row that is compared.
PARTS = ((0, 1, 2, 3, 4, 8), (5, 9), (6, 7))


class ListsSearch(NamedTuple):
    """One search in inverted lists: of `slots` places for codes `codes` are taken, and `kept` rows are compared."""

    dimension: int
    width: int
    subspaces: int
    lists: int
    probes: int
    slots: float
    codes: float
    kept: int
    code_bits: int = 8
    rotate: bool = True

    def work(self) -> tuple[float, ...]:
        """Return the units of each stage, in the order of STAGES."""
        eight, four = float(self.code_bits == 8), float(self.code_bits == 4)
        entered = self.kept * (1.0 + math.log(max(self.codes / max(self.kept, 1), 1.0)))
        return (
            1.0,
            float(self.rotate * self.width * self.dimension),
            float(self.lists * self.width),
            self.lists + self.probes * math.log2(1.0 + self.probes),
            eight * 256.0 * self.width,
            eight * self.slots * self.subspaces,
            entered * math.log2(1.0 + self.kept),
            float(min(self.kept, self.codes) * self.dimension),
            four * self.subspaces,
            four * self.slots * self.subspaces / 2.0,
        )


class CostLines(msgspec.Struct, frozen=True):
    """Seconds of a unit of each stage's work; what a search takes is their sum, since one thread does all."""

    units_s: tuple[float, ...]

    @classmethod
    def fit(cls, measured: Sequence[tuple[Sequence[float], float]]) -> Self:
        """Return the lines that fit pairs of work and seconds best by their relative errors; none is negative."""
        work = np.array([each for each, _ in measured], np.float64)
        seconds = np.array([each for _, each in measured], np.float64)
        scale = np.maximum(work.max(axis=0), 1e-300)
        matrix = work / scale / seconds[:, None]
        found = np.zeros(work.shape[1])
        used = list(range(work.shape[1]))
        while used:  # a stage that would speed a search up takes no part
            solved = np.linalg.lstsq(matrix[:, used], np.ones(len(seconds)), rcond=1e-9)[0]
            if (solved >= 0).all():
                found[used] = solved
                break
            used.pop(int(np.argmin(solved)))
        return cls(tuple(float(each) for each in found / scale))

    def seconds(self, work: Sequence[float]) -> float:
        """Return what so much work takes."""
        return sum(unit * amount for unit, amount in zip(self.units_s, work, strict=True))

    def stages_s(self, work: Sequence[float]) -> tuple[float, ...]:
        """Return what each stage takes."""
        return tuple(unit * amount for unit, amount in zip(self.units_s, work, strict=True))

    def parts_s(self, work: Sequence[float]) -> tuple[float, ...]:
        """Return what each of PARTS takes."""
        stages = self.stages_s(work)
        return tuple(sum(stages[at] for at in part) for part in PARTS)


def expected_codes(sizes: Sequence[int], probes: int) -> float:
    """Return how many codes a query that reads so many of the lists is expected to score (equation 6.4).

    Queries come as rows do, so a list of n rows is met n times as often as one of one row.
    """
    counts = np.asarray(sizes, np.float64)
    total = float(counts.sum())
    return min(probes * float((counts**2).sum()) / total, total) if total else 0.0


def expected_slots(sizes: Sequence[int], probes: int) -> float:
    """Return how many places for codes such a query reads: lists consist of whole blocks."""
    counts = np.asarray(sizes, np.float64)
    slots = np.ceil(counts / BLOCK) * BLOCK
    total = float(counts.sum())
    return min(probes * float((counts * slots).sum()) / total, float(slots.sum())) if total else 0.0
