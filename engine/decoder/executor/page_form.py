"""The lossy form of pages below the host: 8 bits a number, with one scale for each token of a head. Off by default."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST = 127.0
_SCALE_BYTES = 4


class Int8Form:
    """Writes a layer of a page, rows of `dim` numbers, as their scales and then their 8-bit values."""

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        self._dtype, self._dim = dtype, dim

    def size(self, plain_bytes: int) -> int:
        """Return the bytes of a layer in this form."""
        numbers = plain_bytes // self._dtype.itemsize
        return numbers + numbers // self._dim * _SCALE_BYTES

    def shrink(self, layer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a layer's bytes in this form."""
        rows = torch.from_numpy(layer).view(self._dtype).view(-1, self._dim).float()
        scales = (rows.abs().amax(dim=1, keepdim=True) / _MOST).clamp_min(1e-30)
        small = (rows / scales).round().to(torch.int8)
        return np.concatenate([_bytes(scales), _bytes(small)])

    def grow(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the bytes of a layer; each number is off by at most half a scale, plus the rounding of its type."""
        count = len(data) // (self._dim + _SCALE_BYTES)
        whole = torch.from_numpy(data.copy())
        scales = whole[: count * _SCALE_BYTES].view(torch.float32).view(-1, 1)
        rows = whole[count * _SCALE_BYTES :].view(torch.int8).view(-1, self._dim).float() * scales
        return _bytes(rows.to(self._dtype))


def _bytes(values: Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = values.contiguous().view(torch.uint8).reshape(-1).numpy()
    return found
