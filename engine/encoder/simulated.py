"""The simulated encoder: takes the seconds of a linear time model and returns pseudo-random vectors.

The device and the model are called "sim", so that no user takes the vectors for real ones; equal tokens have equal
vectors. No torch is loaded.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.clock import SYSTEM, SystemClock
from common.cost.linear import LinearCost
from common.errors import InvalidRequest
from common.types.model_card import ModelCard
from engine.models.encoders.files import ModelFiles, find

DIMENSION = 384
_TABLE_ROWS = 4096


class SimulatedEncoder:
    """A model that takes `beta_s + alpha_items_s * items + alpha_tokens_s * tokens` seconds a batch.

    With `sigma` the seconds are multiplied by a normally distributed factor of mean 1 and standard deviation `sigma`.
    """

    def __init__(
        self,
        *,
        alpha_items_s: float,
        beta_s: float,
        alpha_tokens_s: float = 0.0,
        sigma: float = 0.0,
        files: ModelFiles | None = None,
        clock: SystemClock = SYSTEM,
    ) -> None:
        self._files = files or find("")
        self._clock = clock
        self._table = _table()
        self.name = "sim"
        self.fingerprint = hashlib.blake2b(b"sim", digest_size=16).hexdigest()
        self.dimension = DIMENSION
        self.max_tokens = self._files.max_tokens
        self.device = "sim"
        self.dtype = "fp32"
        self.known_cost: LinearCost | None = LinearCost(beta_s, alpha_items_s, alpha_tokens_s)
        self._sigma = sigma

    @property
    def reranks(self) -> bool:
        """False: there is no cross-encoder head."""
        return False

    def tokenizer_json(self) -> bytes:
        """Return MiniLM's tokenizer, so that text is tokenized as for a real model."""
        return self._files.tokenizer_json()

    def card(self, *, created_ms: int = 0, partitions: int = 1) -> ModelCard:
        """Return the card of the model named "sim"."""
        return ModelCard(
            name=self.name,
            kind="embed",
            family=f"embed.{self.name}",
            fingerprint=self.fingerprint,
            dimension=self.dimension,
            max_tokens=self.max_tokens,
            partitions=partitions,
            created_ms=created_ms,
        )

    def beside(self) -> None:
        """Return None: the simulated device computes one batch after another."""

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Raise InvalidRequest for a text that is empty or too long."""
        for index, text in enumerate(texts):
            if not 0 < len(text) <= self.max_tokens:
                raise InvalidRequest(
                    f"text {index} has {len(text)} tokens; model sim takes 1 to {self.max_tokens}",
                    param="input",
                )

    def encode(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the texts' pseudo-random vectors after the seconds of the time model."""
        started_s = self._clock.monotonic()
        assert self.known_cost is not None
        seconds = self.known_cost.seconds(len(texts), sum(map(len, texts)))
        due_s = started_s + seconds * max(0.0, random.gauss(1.0, self._sigma))
        rows = np.empty((len(texts), DIMENSION), dtype=np.float32)
        for index, text in enumerate(texts):
            digest = hashlib.blake2b(repr(list(text)).encode(), digest_size=4).digest()
            key = int.from_bytes(digest, "little")
            rows[index] = np.roll(self._table[key % _TABLE_ROWS], key // _TABLE_ROWS % DIMENSION)
        while (left_s := due_s - self._clock.monotonic()) > 0:
            self._clock.sleep(left_s)
        return rows

    def score(
        self, pairs: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Raise InvalidRequest: the sim device reranks by cosine only."""
        raise InvalidRequest(
            f"model sim is no cross-encoder; {len(pairs)} pairs, {len(types)} types"
        )


def _table() -> NDArray[np.float32]:
    """Return unit rows drawn once from a fixed seed."""
    drawn = np.random.Generator(np.random.Philox(7)).standard_normal((_TABLE_ROWS, DIMENSION))
    rows: NDArray[np.float32] = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(
        np.float32
    )
    return rows
