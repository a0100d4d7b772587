"""The packed forward pass on a CPU with AVX512-BF16: oneDNN linears with packed weights, own kernels for the rest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate, chain
from queue import SimpleQueue

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from common.devices import detect
from engine.device import spare
from engine.kernels.encoder import HEAD_WIDTHS, EncoderKernels
from engine.models.encoders.parts import parts_of
from engine.models.encoders.positions import positions
from engine.models.encoders.spec import EncoderSpec, Pooling
from engine.models.encoders.torch_forward import EncoderLinear

_Norm = tuple[Tensor, Tensor, float]
_Ids = Sequence[Sequence[int]]
_CPU = torch.device("cpu")
# While the threads that share a layer's products wait for each other, one of them multiplies and adds so many numbers.
_WAITS = 100e6


def packable(spec: EncoderSpec) -> bool:
    """True if the kernels can compute a model of this shape."""
    return spec.plain and spec.head_dim in HEAD_WIDTHS and spec.hidden % 16 == 0


class PackedForward:
    """The forward pass over packed texts in bf16, with residuals, norms and softmax in fp32.

    A batch is cut into parts (see `parts_of`); each thread computes one part after another, also those of the batch
    that begins once a thread is without a part. If all threads shared each matrix product, all would wait at each
    product for a thread whose core is busy with other work.
    """

    def __init__(
        self, spec: EncoderSpec, weights: dict[str, Tensor], kernels: EncoderKernels, threads: int
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._tables = (
            weights["embeddings.word_embeddings.weight"],
            weights["embeddings.position_embeddings.weight"],
            weights["embeddings.token_type_embeddings.weight"],
        )
        self._norm = _norm(weights, "embeddings.LayerNorm", spec.epsilon)
        self._layers = [_Layer(weights, index, spec, kernels) for index in range(spec.layers)]
        self._waits_tokens = _WAITS / (spec.hidden * (4 * spec.hidden + 2 * spec.intermediate))
        processors = SimpleQueue[tuple[int, ...]]()
        for own in _own_processors(threads):
            processors.put(own)
        self._pool = ThreadPoolExecutor(threads, "part", _begin_part_thread, (processors,))

    def pooled(
        self, texts: _Ids, types: _Ids | None, pooling: Pooling, *, normalise: bool
    ) -> Tensor:
        """Return fp32 (texts, hidden) for texts in any order; the calling thread's number of threads computes."""
        lengths = [len(text) for text in texts]
        out = torch.empty(len(texts), self._spec.hidden)

        def compute(part: slice) -> None:
            with torch.inference_mode():  # set per thread
                rows, starts = self._forward(texts[part], types and types[part])
                self._kernels.pool(rows, starts, pooling, normalise=normalise, out=out[part])

        threads = torch.get_num_threads()
        parts = parts_of(lengths, threads, self._waits_tokens)
        if len(parts) > 1:
            futures = [self._pool.submit(compute, part) for part in parts]
            for ended, future in enumerate(as_completed(futures), 1):
                future.result()
                if ended > len(parts) - threads:
                    spare()  # no part is left for this part's thread
            return out
        torch.set_num_threads(1 if parts else threads)
        try:
            compute(slice(None))
        finally:
            torch.set_num_threads(threads)
        return out

    def rows(self, texts: _Ids, types: _Ids | None) -> Tensor:
        """Return fp32 (tokens, hidden) for texts in any order; `types` are token types, 0 if None."""
        return self._forward(texts, types)[0]

    def _forward(self, texts: _Ids, types: _Ids | None) -> tuple[Tensor, Tensor]:
        """Return the hidden rows, and the row numbers at which texts begin, with the last text's end."""
        lengths = [len(text) for text in texts]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.long)
        ids = torch.tensor(list(chain.from_iterable(texts)), dtype=torch.long)
        places = positions(self._spec, ids, starts)
        kinds = None
        if types is not None:
            kinds = torch.tensor(list(chain.from_iterable(types)), dtype=torch.long)
        rows, rows16 = self._kernels.embed(self._tables, (ids, places, kinds), self._norm)
        for layer in self._layers:
            layer(rows, rows16, starts)
        return rows, starts


def _own_processors(threads: int) -> list[tuple[int, ...]]:
    """Return for each thread the processors that it may use: one each, where there are as many as threads.

    Linux may wake two threads on one processor, where they then take turns.
    """
    allowed = detect().cores
    return [(each,) for each in allowed] if len(allowed) == threads else [allowed] * threads


def _begin_part_thread(processors: SimpleQueue[tuple[int, ...]]) -> None:
    # Torch's number of threads applies to the thread that sets it, and to later threads that set none.
    torch.set_num_threads(1)
    own = processors.get()
    with contextlib.suppress(OSError):  # a processor that was taken away meanwhile
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, own)


class _Layer:
    def __init__(
        self, weights: dict[str, Tensor], index: int, spec: EncoderSpec, kernels: EncoderKernels
    ) -> None:
        base = f"encoder.layer.{index}"
        self._spec, self._kernels = spec, kernels

        def linear(*names: str) -> EncoderLinear:
            return EncoderLinear.of(weights, [f"{base}.{name}" for name in names], "bf16", _CPU)

        self._qkv = linear("attention.self.query", "attention.self.key", "attention.self.value")
        self._out = linear("attention.output.dense")
        self._up = linear("intermediate.dense")
        self._down = linear("output.dense")
        self._norm1 = _norm(weights, f"{base}.attention.output.LayerNorm", spec.epsilon)
        self._norm2 = _norm(weights, f"{base}.output.LayerNorm", spec.epsilon)

    def __call__(self, rows: Tensor, rows16: Tensor, starts: Tensor) -> None:
        """Compute one layer on `rows` and their rounded copy, in place."""
        kernels, spec = self._kernels, self._spec
        attended = kernels.attention(self._qkv(rows16), starts, spec.heads, spec.head_dim)
        kernels.add_norm(rows, self._out(attended), rows16, self._norm1)
        inner = self._up(rows16)
        if spec.activation == "relu":
            F.relu_(inner)
        else:
            tanh = "tanh" if spec.activation == "gelu_tanh" else "none"
            torch.ops.aten.gelu_(inner, approximate=tanh)
        kernels.add_norm(rows, self._down(inner), rows16, self._norm2)


def _norm(weights: dict[str, Tensor], name: str, epsilon: float) -> _Norm:
    return weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon
