"""The reader of GGUF headers: metadata and tensor places, each length checked against the file's size before reading.

The format is ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Weights stay in the file.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

MAGIC = b"GGUF"


class BlockType(NamedTuple):
    """A storage format of ggml: a block of `inputs` numbers takes `bytes` bytes."""

    inputs: int
    bytes: int


TYPES: dict[str, BlockType] = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "Q8_0": BlockType(32, 34),
    "Q4_0": BlockType(32, 18),
    "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22),
    "Q5_1": BlockType(32, 24),
    "Q4_K": BlockType(256, 144),
    "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210),
    "IQ4_NL": BlockType(32, 18),
    "IQ4_XS": BlockType(256, 136),
}
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES, _MOST_STRINGS, _MOST_NUMBERS = 1 << 16, 1 << 22, 1 << 24
_LONGEST = 64 << 20  # the most bytes of a string
_MOST_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place: `shape` has outputs before inputs; `offset` and `size` count bytes in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's metadata and tensors; arrays of strings are lists, arrays of numbers are numpy arrays."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def text(self, key: str, default: str) -> str:
        """Return a metadata entry of type text, `default` if it is missing; ConfigError if it has another type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: {key} is no text; expected text")
        return value

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return a tensor's stored bytes, (outputs, bytes of an output), mapped from the file."""
        inputs = tensor.shape[-1]
        width = inputs // TYPES[tensor.type].inputs * TYPES[tensor.type].bytes
        shape = (tensor.size // width, width)
        return np.memmap(self.path, np.uint8, mode="r", offset=tensor.offset, shape=shape)


def is_gguf(path: Path) -> bool:
    """True for a file that begins with GGUF's magic bytes, or has its suffix."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header; ConfigError names the fault, before memory is allocated for a false length."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ConfigError(f"{path}: does not begin with GGUF; expected a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise ConfigError(f"{path}: {error}; expected a readable GGUF file") from error


class _Header:
    """A cursor over the bytes of a header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 4

    def read(self) -> GgufFile:
        version = self._number("<I")
        if version not in {2, 3}:
            big = version in {2 << 24, 3 << 24}
            what = "is big-endian" if big else f"has version {version}"
            raise self._error(f"{what}; expected little-endian GGUF of version 2 or 3")
        tensors, entries = self._number("<Q"), self._number("<Q")
        for count, least, what in ((tensors, 24, "tensors"), (entries, 13, "metadata entries")):
            if count > _MOST_ENTRIES or count * least > self._size - self._at:
                raise self._error(f"names {count} {what}, for which it is too small or too large")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text("a key")
            if key in metadata:
                raise self._error(f"has {key!r} twice")
            metadata[key] = self._value(self._number("<I"), key)
        found = self._tensors(tensors)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}; expected a power of two")
        start = (self._at + alignment - 1) // alignment * alignment
        return GgufFile(self._path, metadata, self._placed(found, start, alignment))

    def _tensors(self, count: int) -> list[GgufTensor]:
        """Read the tensors' names, shapes, types and offsets; offsets count from the beginning of the first tensor."""
        found = []
        for _ in range(count):
            name = self._text("a tensor's name")
            dimensions = self._number("<I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._error(f"tensor {name!r} has {dimensions} dimensions; expected 1 to 4")
            shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
            number, offset = self._number("<I"), self._number("<Q")
            kind = _TYPE_NAMES.get(number, f"of type {number}")
            if kind not in TYPES:
                raise self._error(
                    f"tensor {name!r} is {kind}; expected {', '.join(TYPES)}: quantise the model anew"
                )
            block = TYPES[kind]
            if min(shape) < 1 or shape[-1] % block.inputs:
                raise self._error(
                    f"tensor {name!r} has shape {shape}; expected multiples of {block.inputs} in {kind}"
                )
            size = block.bytes
            for length in (*shape[:-1], shape[-1] // block.inputs):
                size *= length
            found.append(GgufTensor(name, kind, shape, offset, size))
        return found

    def _placed(
        self, tensors: list[GgufTensor], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors with their offsets in the file; ConfigError if one exceeds it or overlaps another."""
        placed: dict[str, GgufTensor] = {}
        end = start
        for tensor in sorted(tensors, key=lambda each: each.offset):
            offset = start + tensor.offset
            if tensor.offset % alignment or offset < end or offset + tensor.size > self._size:
                raise self._error(
                    f"tensor {tensor.name!r} lies at bytes {offset} to {offset + tensor.size}: not aligned, on another "
                    "tensor, or beyond the end; expected a file that was written and copied whole"
                )
            if tensor.name in placed:
                raise self._error(f"has tensor {tensor.name!r} twice")
            end = offset + tensor.size
            placed[tensor.name] = dataclasses.replace(tensor, offset=offset)
        return placed

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self._error(f"{key!r} is of type {kind}; expected one from 0 to 12")
        return self._number(_NUMBERS[kind])

    def _array(self, key: str) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            if count > _MOST_STRINGS or count * 8 > self._size - self._at:
                raise self._error(f"{key!r} has {count} strings, for which it is too small")
            return [self._text(key) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._error(
                f"{key!r} is an array of type {kind}; expected one of numbers or strings"
            )
        form = np.dtype(_NUMBERS[kind])
        size = count * form.itemsize
        if count > _MOST_NUMBERS or size > self._size - self._at:
            raise self._error(f"{key!r} has {count} numbers, for which it is too small")
        self._at += size
        return np.frombuffer(self._data[self._at - size : self._at], form)

    def _text(self, what: str) -> str:
        length = self._number("<Q")
        if length > _LONGEST or length > self._size - self._at:
            raise self._error(f"{what!r} has {length} bytes; expected text within the file")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        size = struct.calcsize(form)
        if size > self._size - self._at:
            raise self._error("ends within its header; expected a file that was copied whole")
        self._at += size
        return struct.unpack_from(form, self._data, self._at - size)[0]

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}"[:500])
