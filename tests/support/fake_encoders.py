"""A model that computes little, fails on demand, and can be held: for what no real model does on purpose."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from common.cost.linear import LinearCost
from common.errors import InvalidRequest
from common.types.model_card import ModelCard
from common.wire.jobs import EmbedWork
from common.wire.message import encode
from common.worker.leases import Lease

POISON, NAN = 666, 667
FINGERPRINT = "f" * 32


class TinyModel:
    """Vectors of length 4 that tell which tokens they came from; POISON raises, NAN gives NaN."""

    def __init__(self) -> None:
        self.name = "tiny"
        self.fingerprint = FINGERPRINT
        self.dimension = 4
        self.max_tokens = 1000
        self.device = "cpu"
        self.dtype = "fp32"
        self.known_cost: LinearCost | None = LinearCost(0.0, 0.0, 0.0)
        self.batches: list[list[list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    @property
    def reranks(self) -> bool:
        return False

    def tokenizer_json(self) -> bytes:
        return b"{}"

    def card(self, *, created_ms: int = 0, partitions: int = 1) -> ModelCard:
        return ModelCard(
            name=self.name,
            kind="embed",
            family="embed.tiny",
            fingerprint=self.fingerprint,
            dimension=4,
            max_tokens=self.max_tokens,
            partitions=partitions,
            created_ms=created_ms,
        )

    def beside(self) -> None:
        """Return None: there is one device."""

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        if not all(texts):
            raise InvalidRequest("a text is empty")

    def encode(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        self.batches.append([list(text) for text in texts])
        self.entered.set()
        assert self.gate.wait(60)
        if any(POISON in text for text in texts):
            raise RuntimeError("poisoned")
        rows = np.array([self.row(text) for text in texts], dtype=np.float32)
        rows[[NAN in text for text in texts]] = np.nan
        return rows

    def score(self, pairs: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> np.ndarray:
        raise InvalidRequest("not a cross-encoder")

    @staticmethod
    def row(text: Sequence[int]) -> list[float]:
        """Return the vector of one text."""
        return [float(sum(text)), float(len(text)), float(text[0]), 1.0]


def work(*texts: list[int], fingerprint: str = FINGERPRINT) -> bytes:
    """Return an encoded EmbedWork."""
    return encode(EmbedWork(fingerprint=fingerprint, tokens=list(texts)))


def lease(payload: bytes, job: str = "embed.tiny~0~x", *, alone: bool = False) -> Lease:
    """Return a lease as if read from a lane."""
    return Lease(job, payload, 1, 1, 2**53, "r", 1, alone, "gpu", "1-0", 1, "w")
