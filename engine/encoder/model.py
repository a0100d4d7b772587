"""The interface of encoder models: encoders, cross-encoders, and the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.cost.linear import LinearCost
from common.types.model_card import ModelCard

Floats = NDArray[np.float32]


class EncoderModel(Protocol):
    """A model of token lists: `encode` returns vectors; a cross-encoder's `score` returns scores of pairs."""

    name: str
    fingerprint: str
    dimension: int
    max_tokens: int
    device: str
    dtype: str
    known_cost: LinearCost | None

    @property
    def reranks(self) -> bool:
        """True for a cross-encoder."""

    def tokenizer_json(self) -> bytes:
        """Return the tokenizer for the router."""

    def card(self, *, created_ms: int = 0, partitions: int = 1) -> ModelCard:
        """Return the model's card."""

    def beside(self) -> EncoderModel | None:
        """Return the model for a second thread, with the same weights and one core; None if the device has no room.

        An accelerator computes one thing after another, so a second thread would gain nothing there.
        """

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Raise InvalidRequest for texts that the model cannot take."""

    def encode(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Return one float32 row of `dimension` values per text, (texts, dimension)."""

    def score(self, pairs: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Floats:
        """Return one raw score per pair, (pairs,); `types` are token types, or [] for all 0."""
