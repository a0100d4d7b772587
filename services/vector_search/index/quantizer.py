"""The quantizer of inverted lists: a rotation, centroids of the lists and the words of the codes, versioned as one.

A row is rotated, given to the list of the nearest centroid, and what is left of it is cut into subspaces; its code
names the nearest of 256 or 16 words in each (product quantization with OPQ; chapters 2 and 6 of arXiv 2508.08469).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np

from common.wire.tuning import IndexSetting
from services.vector_search.index.rows import Floats, Ints, Metric

CodeBits = Literal[4, 8]
# A byte of a code tells of four dimensions, of more where there would be more than 256: sums of tables have 16 bits.
_PER_BYTE, _MOST_BYTES = 4, 256
# The kernel looks so many subspaces up together where codes have 4 bits.
_EIGHT = 8
# The second has codes of 4 bits, too; a first is a second of 8 bits.
_MAGICS = (b"spillway quantizer 1\n", b"spillway quantizer 2\n")
# Rows that are compared with all centroids at once make so many products at most.
_PRODUCTS = 1 << 22
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Coding(NamedTuple):
    """How rows in lists are coded: the bits by which a code names a word, and whether rows are rotated before (OPQ)."""

    code_bits: CodeBits = 8
    rotate: bool = True

    @classmethod
    def of(cls, setting: IndexSetting) -> Self:
        """Return how a setting codes rows in lists."""
        return cls(setting.code_bits, setting.rotate)


# The coding of lists that no plan asks another one for.
USUAL = Coding()


class _Header(msgspec.Struct, frozen=True):
    """The sizes of a quantizer, and its version: what a damaged file does not agree with."""

    version: str
    metric: Metric
    trained: int
    dimension: int
    width: int
    lists: int
    subspaces: int
    code_bits: CodeBits = 8


def subspaces_of(dimension: int, bits: CodeBits = 8) -> tuple[int, int]:
    """Return (subspaces, dimensions of each) for rows; together they may be a few dimensions more, which are zero.

    Of 4 bits there are twice as many of half the dimensions, a multiple of eight: up to 16 dimensions more.
    """
    per_byte = max(_PER_BYTE, -(-dimension // _MOST_BYTES))
    if bits == 8:
        return -(-dimension // per_byte), per_byte
    part = -(-per_byte // 2)
    return -(-dimension // (_EIGHT * part)) * _EIGHT, part


def words_of(bits: CodeBits) -> int:
    """Return how many words a subspace has."""
    return 1 << bits


def unrotated(width: int, dimension: int) -> Floats:
    """Return the rotation (width, dimension) that leaves rows as they are."""
    return np.eye(width, dimension, dtype=np.float32)


@dataclass(frozen=True)
class Quantizer:
    """A trained quantizer: `rotation` (width, dimension), `centroids` (lists, width), `words` (subspaces, words, part).

    A subspace has 256 words where codes have 8 bits, 16 where they have 4. `trained` is how many rows it was trained
    for. Nothing of it changes.
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
        """Subspaces of a row, each with its word."""
        return len(self.words)

    @property
    def code_bits(self) -> CodeBits:
        """Bits by which a code names the word of a subspace."""
        return 8 if self.words.shape[1] == words_of(8) else 4

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's code."""
        return self.subspaces * self.code_bits // 8

    @property
    def coding(self) -> Coding:
        """How it codes rows."""
        return Coding(self.code_bits, self.rotates)

    @cached_property
    def rotates(self) -> bool:
        """Whether rows are rotated (OPQ), rather than taken as they are."""
        return not np.array_equal(self.rotation, unrotated(self.width, self.dimension))

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
        if self.code_bits != 8:
            digest.update(b"of 4 bits")
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
            self.version, self.metric, self.trained, self.dimension, self.width, self.lists, self.subspaces,
            self.code_bits,
        )  # fmt: skip
        parts = b"".join(part.tobytes() for part in self._parts())
        return _MAGICS[-1] + msgspec.json.encode(header) + b"\n" + parts

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Read what `to_bytes` wrote, or wrote before there were codes of 4 bits; ValueError if it is damaged."""
        kept = bytes(data)
        head, _, body = kept[len(_MAGICS[0]) :].partition(b"\n")
        if not kept.startswith(_MAGICS):
            raise ValueError("these are not the bytes of a quantizer")
        try:
            header = msgspec.json.decode(head, type=_Header)
        except msgspec.MsgspecError as error:
            raise ValueError(f"the header of a quantizer is damaged: {error}") from error
        part = header.width // max(header.subspaces, 1)
        shapes = (
            (header.width, header.dimension),
            (header.lists, header.width),
            (header.subspaces, words_of(header.code_bits), part),
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
