"""Token windows as vectors, for the search: MiniLM of their text, and for training counts of their rare tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from engine.models.encoders.encoder import Encoder
from engine.models.retro.database import Vectors


class CountedTokens:
    """A stand-in for an encoder, a thousand times faster: a token counts the more, the fewer documents have it."""

    def __init__(self, documents: Sequence[Sequence[int]], vocabulary: int) -> None:
        seen = np.ones(vocabulary)
        for document in documents:
            seen[np.unique(document)] += 1
        self._weights = np.log((len(documents) + 1) / seen).clip(0).astype(np.float32)

    def __call__(self, windows: Sequence[Sequence[int]]) -> Vectors:
        """Return one unit vector [vocabulary] for each list of tokens."""
        out = np.zeros((len(windows), len(self._weights)), np.float32)
        for row, window in zip(out, windows, strict=True):
            np.add.at(row, np.asarray(window, np.int64), 1)
        out *= self._weights
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        vectors: Vectors = out / np.maximum(norms, 1e-9)
        return vectors


class EncodedText:
    """The vectors of windows' texts by an encoder, MiniLM unless another is given."""

    def __init__(self, tokenizer: Tokenizer, encoder: Encoder | None = None) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder or Encoder.load(dtype="fp32", threads=1)
        self._texts = Tokenizer.from_str(self._encoder.tokenizer_json().decode())

    def __call__(self, windows: Sequence[Sequence[int]]) -> Vectors:
        """Return one unit vector [dimension] for each list of tokens."""
        texts = [self._tokenizer.decode(list(window)) for window in windows]
        ids = [found.ids for found in self._texts.encode_batch(texts)]
        out = [self._encoder.encode(ids[n : n + 64]) for n in range(0, len(ids), 64)]
        return np.concatenate(out)
