"""Weights of a GGUF file under the names of safetensors: as stored, or dequantised."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from engine.models.decoders.spec import DecoderSpec
from engine.models.decoders.weights import joined_names, wanted
from engine.models.gguf.blocks import dequantised, finite
from engine.models.gguf.config import architecture, huggingface_name
from engine.models.gguf.reader import GgufFile, GgufTensor


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is still in its file; `part` selects its rows where several tensors are stored as one.

    `heads` is the number of heads if the rows of each head must be reordered, else 0.
    """

    file: GgufFile
    tensor: GgufTensor
    heads: int = 0
    part: slice | None = None

    @property
    def type(self) -> str:
        """The name of ggml's type."""
        return self.tensor.type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (outputs, inputs)."""
        if self.part is None:
            return self.tensor.shape
        return (self.part.stop - self.part.start, *self.tensor.shape[1:])

    def rows(self) -> NDArray[np.uint8]:
        """Read the stored bytes, (outputs, bytes of an output), contiguous; ConfigError if a number is not finite."""
        rows = self.file.rows(self.tensor)
        if self.part is not None:
            rows = rows[self.part]
        if not finite(self.type, rows):
            raise ConfigError(
                f"{self.file.path}: tensor {self.tensor.name!r} holds NaN or infinity"
            )
        if not self.heads:
            return rows
        if len(self.shape) == 1:
            rows = rows.reshape(self.shape[0], -1)
        # From the order for rotations of neighbours to the order for rotations of halves of a head.
        each = rows.reshape(self.heads, self.shape[0] // self.heads // 2, 2, -1)
        return np.ascontiguousarray(each.swapaxes(1, 2)).reshape(rows.shape)

    def numbers(self) -> Tensor:
        """Read the tensor as fp32."""
        return torch.from_numpy(dequantised(self.type, self.rows()).reshape(self.shape).copy())


def stored_weights(file: GgufFile, spec: DecoderSpec) -> dict[str, Tensor | StoredTensor]:
    """Return every matrix as stored, still in its file, and norms and biases in fp32.

    ConfigError names a tensor that is missing or misshapen.
    """
    return {
        name: stored if len(stored.shape) > 1 else stored.numbers()
        for name, stored in _tensors(file, spec)
    }


def dequantised_weights(
    file: GgufFile, spec: DecoderSpec, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return every tensor dequantised to `dtype`; ConfigError names one that is missing, misshapen or not finite."""
    return {
        name: stored.numbers().to(device=device, dtype=dtype)
        for name, stored in _tensors(file, spec)
    }


def matrix_types(file: GgufFile) -> set[str]:
    """Return the storage types of the file's matrices."""
    return {each.type for each in file.tensors.values() if len(each.shape) > 1}


def _tensors(file: GgufFile, spec: DecoderSpec) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name and place of every tensor that the forward pass reads."""
    found = _places(file, spec)
    turned = (
        {"q_proj": spec.heads, "k_proj": spec.kv_heads} if architecture(file).neighbours else {}
    )
    for name, shape in wanted(spec):
        stored = found.get(name)
        if stored is None:
            raise ConfigError(f"{file.path}: the tensor for {name!r} is missing")
        if stored.shape != shape:
            raise ConfigError(
                f"{file.path}: tensor {stored.tensor.name!r} has shape {stored.shape}; expected {shape}"
            )
        if len(shape) == 1 and stored.type != "F32":
            raise ConfigError(
                f"{file.path}: tensor {stored.tensor.name!r} is {stored.type}; expected F32"
            )
        yield name, dataclasses.replace(stored, heads=turned.get(name.split(".")[-2], 0))


def _places(file: GgufFile, spec: DecoderSpec) -> dict[str, StoredTensor]:
    """Return every tensor's place by its safetensors name, also of tensors that are stored as rows of a joined one."""
    of, sizes, joined = architecture(file), dict(wanted(spec)), joined_names(spec)
    found = {}
    for stored, tensor in file.tensors.items():
        name = huggingface_name(stored, of)
        if name is None:
            continue
        begin = 0
        for part in joined.get(name, ()):
            end = begin + sizes[part][0]
            found[part] = StoredTensor(file, tensor, part=slice(begin, end))
            begin = end
        if name in joined and begin != tensor.shape[0]:
            raise ConfigError(
                f"{file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows; expected {begin}"
            )
        found.setdefault(name, StoredTensor(file, tensor))
    return found
