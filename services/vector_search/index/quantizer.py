"""The quantizer of inverted lists: a rotation, centroids of the lists and the words of the codes, versioned as one.

A row is rotated, given to the list of the nearest centroid, and what is left of it is cut into subspaces; its code
names the nearest of 256 words in each (product quantization with OPQ; chapters 2 and 6 of arXiv 2508.08469).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np

from services.vector_search.index.rows import Floats, Ints, Metric

WORDS = 256
# A subspace has four dimensions, more where its codes would be more than 256 bytes: sums of tables have 16 bits.
_PART, _MOST_SUBSPACES = 4, 256
_MAGIC = b"spillway quantizer 1\n"
# Rows that are compared with all centroids at once make so many products at most.
_PRODUCTS = 1 << 22
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Header(msgspec.Struct, frozen=True):
    """The sizes of a quantizer, and its version: what a damaged file does not agree with."""

    version: str
    metric: Metric
    trained: int
    dimension: int
    width: int
    lists: int
    subspaces: int


def subspaces_of(dimension: int) -> tuple[int, int]:
    """Return (subspaces, dimensions of each) for rows; together they may be a few dimensions more, which are zero."""
    part = max(_PART, -(-dimension // _MOST_SUBSPACES))
    return -(-dimension // part), part


@dataclass(frozen=True)
class Quantizer:
    """A trained quantizer: `rotation` (width, dimension), `centroids` (lists, width), `words` (subspaces, 256, part).

    `trained` is how many rows it was trained for. Nothing of it changes.
    """

    metric: Metric
    trained: int
    rotation: Floats
    centroids: Floats
    words: Floats

    @property
    def dimension(self) -> int:
        """Dimensions of a row."""
        return int(self.rotation.shape[1])

    @property
    def width(self) -> int:
        """Dimensions of a rotated row: subspaces times their dimensions."""
        return int(self.rotation.shape[0])

    @property
    def subspaces(self) -> int:
        """Subspaces, which are also the bytes of a code."""
        return len(self.words)

    @property
    def lists(self) -> int:
        """Lists that rows are spread over."""
        return len(self.centroids)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.rotation.nbytes + self.centroids.nbytes + self.words.nbytes

    @cached_property
    def version(self) -> str:
        """The blake2b of all that it consists of, in hexadecimal digits: equal quantizers make equal codes."""
        sizes = (self.metric, self.trained, self.dimension, self.width, self.lists, self.subspaces)
        digest = hashlib.blake2b(repr(sizes).encode(), digest_size=16)
        for part in self._parts():
            digest.update(part.data)
        return digest.hexdigest()

    @cached_property
    def halves(self) -> Floats:
        """Half the square of each centroid."""
        return _halves(self.centroids)

    def _parts(self) -> tuple[Floats, Floats, Floats]:
        return self.rotation, self.centroids, self.words

    # -- coding

    def rotated(self, vectors: Floats) -> Floats:
        """Return vectors (n, dimension) as (n, width)."""
        turned: Floats = np.ascontiguousarray(vectors @ self.rotation.T)
        return turned

    def nearest_lists(self, rotated: Floats) -> Ints:
        """Return the list of each rotated row: that of the nearest centroid."""
        found = np.empty(len(rotated), np.int64)
        some = max(1, _PRODUCTS // self.lists)
        for at in range(0, len(rotated), some):
            products = rotated[at : at + some] @ self.centroids.T
            found[at : at + some] = np.argmax(products - self.halves, axis=1)
        return found

    def residuals(self, rotated: Floats, lists: Ints) -> Floats:
        """Return what is left of rotated rows in their lists."""
        left: Floats = rotated - self.centroids[lists]
        return left

    def codes(self, residuals: Floats) -> Bytes:
        """Return the code (n, subspaces) of each residual: in every subspace the nearest word."""
        part, made = self.words.shape[2], np.empty((len(residuals), self.subspaces), np.uint8)
        for j, words in enumerate(self.words):
            own = residuals[:, j * part : (j + 1) * part]
            made[:, j] = np.argmax(own @ words.T - _halves(words), axis=1)
        return made

    def decoded(self, lists: Ints, codes: Bytes) -> Floats:
        """Return the rotated rows that codes in lists stand for."""
        words = self.words[np.arange(self.subspaces), codes].reshape(len(codes), self.width)
        made: Floats = self.centroids[lists] + words
        return made

    # -- files

    def to_bytes(self) -> bytes:
        """Return it as bytes, for files and for other processes."""
        header = _Header(
            self.version, self.metric, self.trained, self.dimension, self.width, self.lists, self.subspaces
        )  # fmt: skip
        parts = b"".join(part.tobytes() for part in self._parts())
        return _MAGIC + msgspec.json.encode(header) + b"\n" + parts

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Read what `to_bytes` wrote; ValueError if it is damaged."""
        kept = bytes(data)
        head, _, body = kept.removeprefix(_MAGIC).partition(b"\n")
        if not kept.startswith(_MAGIC):
            raise ValueError("these are not the bytes of a quantizer")
        try:
            header = msgspec.json.decode(head, type=_Header)
        except msgspec.MsgspecError as error:
            raise ValueError(f"the header of a quantizer is damaged: {error}") from error
        part = header.width // max(header.subspaces, 1)
        shapes = (
            (header.width, header.dimension),
            (header.lists, header.width),
            (header.subspaces, WORDS, part),
        )
        sizes = [int(np.prod(shape)) for shape in shapes]
        if 4 * sum(sizes) != len(body):
            raise ValueError(f"a quantizer has {len(body)} bytes; expected {4 * sum(sizes)}")
        cuts = np.split(np.frombuffer(body, np.float32), np.cumsum(sizes)[:-1])
        rotation, centroids, words = (
            cut.reshape(shape) for cut, shape in zip(cuts, shapes, strict=True)
        )
        made = cls(header.metric, header.trained, rotation, centroids, words)
        if made.version != header.version:
            raise ValueError(f"a quantizer's hash is {made.version}; expected {header.version}")
        return made


def _halves(vectors: Floats) -> Floats:
    half: Floats = 0.5 * np.einsum("nd,nd->n", vectors, vectors)
    return half
