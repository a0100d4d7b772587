"""The encoder's C++ kernels, called on torch tensors; without a compiler or AVX512-BF16 torch computes instead.

The library is linked without an OpenMP runtime of its own and uses torch's, so no second pool of threads spins beside
torch's. A call uses as many threads as torch is set to in the calling thread.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from common.native.finder import open_first
from engine.kernels.sources import ENCODER

HEAD_WIDTHS = (32, 64)
_POOLINGS = {"cls": 0, "mean": 1, "max": 2}


class EncoderKernels:
    """The compiled kernels on torch tensors; all tensors are contiguous and on the CPU."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._library = functions
        for name in ("spillway_add_norm", "spillway_embed", "spillway_pool"):
            getattr(functions, name).restype = None

    @classmethod
    def load(cls, directory: Path | None = None) -> EncoderKernels | None:
        """Return the kernels, or None if they cannot be built or loaded."""
        library = open_first((ENCODER,), directory)
        return None if library is None else cls(library)

    def attention(self, qkv: Tensor, starts: Tensor, heads: int, width: int) -> Tensor:
        """Return bf16 (rows, heads * width) from bf16 (rows, 3 * heads * width); texts begin at `starts`."""
        out = torch.empty(qkv.shape[0], heads * width, dtype=torch.bfloat16)
        missing = self._library.spillway_attention(
            _pointer(qkv),
            _pointer(out),
            _pointer(starts),
            ctypes.c_int64(len(starts) - 1),
            ctypes.c_int(heads),
            ctypes.c_int(width),
            ctypes.c_float(width**-0.5),
        )
        assert missing == 0, f"no kernel for heads of {width}"
        return out

    def add_norm(
        self, rows: Tensor, delta: Tensor, rows16: Tensor, norm: tuple[Tensor, Tensor, float]
    ) -> None:
        """Set `rows` (fp32) to norm(rows + delta), and `rows16` to the same values rounded to bf16."""
        weight, bias, epsilon = norm
        self._library.spillway_add_norm(
            _pointer(rows),
            _pointer(delta),
            _pointer(rows16),
            ctypes.c_int64(rows.shape[0]),
            ctypes.c_int64(rows.shape[1]),
            _pointer(weight),
            _pointer(bias),
            ctypes.c_float(epsilon),
        )

    def embed(
        self,
        tables: tuple[Tensor, Tensor, Tensor],
        ids: tuple[Tensor, Tensor, Tensor | None],
        norm: tuple[Tensor, Tensor, float],
    ) -> tuple[Tensor, Tensor]:
        """Return rows (fp32) = norm(words + positions + types), and the same values rounded to bf16."""
        count, hidden = len(ids[0]), tables[0].shape[1]
        rows = torch.empty(count, hidden)
        rows16 = torch.empty(count, hidden, dtype=torch.bfloat16)
        weight, bias, epsilon = norm
        self._library.spillway_embed(
            *(_pointer(table) for table in tables),
            *(None if index is None else _pointer(index) for index in ids),
            _pointer(rows),
            _pointer(rows16),
            ctypes.c_int64(count),
            ctypes.c_int64(hidden),
            _pointer(weight),
            _pointer(bias),
            ctypes.c_float(epsilon),
        )
        return rows, rows16

    def pool(
        self, rows: Tensor, starts: Tensor, pooling: str, *, normalise: bool, out: Tensor
    ) -> None:
        """Set `out` (texts, hidden) to the pooled fp32 `rows` (tokens, hidden) of texts that begin at `starts`."""
        self._library.spillway_pool(
            _pointer(rows),
            _pointer(starts),
            ctypes.c_int64(len(starts) - 1),
            ctypes.c_int64(rows.shape[1]),
            ctypes.c_int(_POOLINGS[pooling]),
            ctypes.c_int(normalise),
            _pointer(out),
        )


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
