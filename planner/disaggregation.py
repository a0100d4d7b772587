"""The ratio of inference to retrieval units of a disaggregated RAG system (Chameleon, section 4.6.3).

Each inference unit generates for a batch of sequences, sends a batch of queries every `interval` steps, and does
nothing until these are answered. A retrieval unit is whatever answers a batch of queries alone: one process with the
whole collection, or one set of all its shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RetrievalLoad:
    """Measured times of a workload, all above 0: seconds of one step and of one retrieval, both of a whole batch."""

    inference_s: float
    retrieval_s: float
    interval: int = 1
    batch: int = 1

    @property
    def generation_s(self) -> float:
        """Seconds that an inference unit computes between two retrievals."""
        return self.interval * self.inference_s

    @property
    def tokens(self) -> int:
        """Tokens that an inference unit generates between two retrievals."""
        return self.interval * self.batch


class UnitSplit(NamedTuple):
    """Units of each kind."""

    inference: int
    retrieval: int


@dataclass(frozen=True, slots=True)
class SplitPrediction:
    """What a split gives: tokens/s of all units together, and what each kind spends its time on, in shares of 1.

    `tokens_per_s` is the least of two limits, and holds where times vary little or units are many. With times that
    vary as an exponential distribution does, it is `tokens_per_s_varying`. An inference unit computes, has its queries
    answered, or queues for a retrieval unit.
    """

    split: UnitSplit
    tokens_per_s: float
    tokens_per_s_varying: float
    computes: float
    is_answered: float
    queues: float
    retrieval_works: float

    @property
    def inference_idles(self) -> float:
        """Share of the time in which an inference unit does nothing."""
        return 1 - self.computes

    @property
    def retrieval_idles(self) -> float:
        """Share of the time in which a retrieval unit does nothing."""
        return 1 - self.retrieval_works


def inference_share(load: RetrievalLoad) -> float:
    """Return the share of inference units with which neither kind waits for the other; at least one half."""
    whole_s = load.generation_s + load.retrieval_s
    return whole_s / (whole_s + load.retrieval_s)


def throughput(load: RetrievalLoad, split: UnitSplit) -> float:
    """Return tokens/s of a split: the least of what its inference units and its retrieval units allow."""
    inference = load.tokens * split.inference / (load.generation_s + load.retrieval_s)
    return min(inference, load.tokens * split.retrieval / load.retrieval_s)


def throughput_varying(load: RetrievalLoad, split: UnitSplit) -> float:
    """Return tokens/s of a split whose retrievals take exponentially distributed times (the machine-repair model)."""
    # Weights of 0, 1, … units at retrieval, in logarithms: they differ by more than floats hold.
    weights = [0.0]
    for there in range(1, split.inference + 1):
        comes = (split.inference - there + 1) / load.generation_s
        goes = min(there, split.retrieval) / load.retrieval_s
        weights.append(weights[-1] + math.log(comes / goes))
    most = max(weights)
    shares = [math.exp(weight - most) for weight in weights]
    busy = sum(share * min(there, split.retrieval) for there, share in enumerate(shares))
    return load.tokens * busy / (sum(shares) * load.retrieval_s)


def predict(load: RetrievalLoad, split: UnitSplit) -> SplitPrediction:
    """Return what a split gives; both kinds have at least one unit."""
    found = throughput(load, split)
    retrievals = found / load.tokens  # a second
    computes = retrievals * load.generation_s / split.inference
    is_answered = retrievals * load.retrieval_s / split.inference
    return SplitPrediction(
        split=split,
        tokens_per_s=found,
        tokens_per_s_varying=throughput_varying(load, split),
        computes=computes,
        is_answered=is_answered,
        queues=max(1 - computes - is_answered, 0.0),
        retrieval_works=retrievals * load.retrieval_s / split.retrieval,
    )


def best_split(load: RetrievalLoad, units: int) -> UnitSplit:
    """Return the split of so many units with the highest throughput; of equal ones that with less inference.

    Units of both kinds are taken to cost the same. ValueError if there are fewer than two.
    """
    if units < 2:
        raise ValueError(f"{units} units: expected at least one of each kind")
    near = min(int(units * inference_share(load)), units - 2) if units > 2 else 1
    splits = [UnitSplit(n, units - n) for n in (near, near + 1) if n < units]
    return max(splits, key=lambda split: (throughput(load, split), -split.inference))
