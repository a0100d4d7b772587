"""The retrieval database: chunks of tokens, each with what follows it in its document (PipeRAG, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.models.retro.network import PAD

Tokens = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Embed = Callable[[Sequence[Sequence[int]]], Vectors]
Retrieve = Callable[[Sequence[int]], "Sequence[Neighbour]"]


class Neighbour(NamedTuple):
    """A retrieved chunk: the tokens of its document, and the place in it where the chunk begins."""

    document: Tokens
    begin: int

    def value(self, tokens: int, shift: int = 0) -> list[int]:
        """Return `tokens` tokens from `shift` tokens after the chunk's begin, filled with PAD at the document's end.

        This is Shift of section 5.3: what a stale query found loses its first tokens, and is refilled to its length.
        """
        begin = self.begin + shift
        found: list[int] = self.document[begin : begin + tokens].tolist()
        return found + [PAD] * (tokens - len(found))


def values(found: Sequence[Neighbour], k: int, tokens: int, shift: int = 0) -> list[list[int]]:
    """Return the values of the first `k` neighbours; PAD stands for those that were not found."""
    rows = [each.value(tokens, shift) for each in found[:k]]
    return rows + [[PAD] * tokens for _ in range(k - len(rows))]


class ChunkDatabase:
    """Chunks of documents by vector, searched exactly; `embed` gives one unit vector for each token list."""

    def __init__(self, documents: Sequence[Sequence[int]], chunk: int, embed: Embed) -> None:
        self._embed = embed
        self._chunks = [
            Neighbour(tokens, begin)
            for tokens in (np.asarray(document, np.int64) for document in documents)
            for begin in range(0, len(tokens), chunk)
        ]
        self.vectors = embed([each.value(chunk) for each in self._chunks])

    def __len__(self) -> int:
        return len(self._chunks)

    def search(self, windows: Sequence[Sequence[int]], k: int) -> list[list[int]]:
        """Return, for each window of tokens, the numbers of the `k` chunks with the largest product, best first."""
        scores = self._embed(windows) @ self.vectors.T
        k = min(k, len(self._chunks))
        some = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.take_along_axis(-scores, some, 1).argsort(1, kind="stable")
        found: list[list[int]] = np.take_along_axis(some, order, 1).tolist()
        return found

    def __getitem__(self, number: int) -> Neighbour:
        return self._chunks[number]

    def retriever(self, k: int) -> Retrieve:
        """Return the function from a window of tokens to its `k` nearest neighbours."""
        return lambda window: [self[number] for number in self.search([window], k)[0]]
