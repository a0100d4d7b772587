"""Sources of quantizers: all shards of a collection code their rows by one, which any of them may train."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.vector_search.index.quantizer import Quantizer


class TrainedQuantizer(NamedTuple):
    """A quantizer, and how many lists its training was asked for: it has fewer where rows were few or alike."""

    quantizer: Quantizer
    asked: int


class QuantizerSource(Protocol):
    """The quantizer that an index shares; asked from the thread that maintains the index, and never waits."""

    def current(self) -> TrainedQuantizer | None:
        """Return the quantizer to code rows by, None while there is none here."""

    def may_train(self) -> bool:
        """Return whether the caller may train one to take its place now; if not, that is asked for."""

    def offer(self, made: TrainedQuantizer) -> None:
        """Let a quantizer take the place of the current one, for all who share it; after `may_train` was True."""

    def give_up(self) -> None:
        """Train none, so that another may."""


class OwnQuantizer:
    """The quantizer of an index that shares it with nobody."""

    def __init__(self) -> None:
        self._now: TrainedQuantizer | None = None

    def current(self) -> TrainedQuantizer | None:
        """Return the last one that was offered."""
        return self._now

    def may_train(self) -> bool:
        """Return that it may be trained."""
        return True

    def offer(self, made: TrainedQuantizer) -> None:
        """Keep a quantizer."""
        self._now = made

    def give_up(self) -> None:
        """Do nothing: nobody waits."""
