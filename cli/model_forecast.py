"""A forecast of a chat model's memory and speed on this machine's CPU, from its headers, without loading it."""

from __future__ import annotations

import dataclasses
import math

from common.config import WorkerConfig
from common.native.library import cpu_flags

_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32}  # bytes of a weight
# Bytes in memory per byte in the file, if not 1: see docs/decisions.md, 118.
_PACKED = {"Q4_K": 9472 / 9216, "Q5_K": 11_520 / 11_264, "IQ4_XS": 8832 / 8704}
_SHARE = 0.68  # share of the memory's bandwidth that decoding reaches (docs/benchmarks, row L1)
_SAMPLE = 1 << 26  # numbers read to measure the bandwidth


@dataclasses.dataclass(frozen=True, slots=True)
class ModelForecast:
    """Bytes of weights and of a token's keys and values, and tokens a second of one stream; None: not known."""

    kind: str
    parameters: int
    disk_bytes: int
    weight_bytes: int
    token_bytes: int
    context: int
    bandwidth: float | None
    tokens_per_s: float | None


def forecast(model: str, config: WorkerConfig, *, threads: int) -> ModelForecast:
    """Return a model's forecast; ConfigError if it cannot be served, or its headers are damaged.

    `threads` threads read memory for a moment to measure its bandwidth (bytes a second); with 0 no speed is predicted.
    """
    from engine.models.decoders.files import find_decoder  # noqa: PLC0415 - loads torch below
    from engine.models.decoders.weights import (  # noqa: PLC0415
        EMBED,
        HALF_NAMES,
        stored_dtypes,
        wanted,
    )

    files = find_decoder(model)
    files.tokenizer_json()
    spec = files.spec
    sizes = {name: math.prod(shape) for name, shape in wanted(spec)}
    kind: str = config.chat_dtype
    if files.gguf is not None and kind == "auto":
        tensors = files.gguf.tensors.values()
        weights = sum(each.size * _PACKED.get(each.type, 1.0) for each in tensors)
        table = next(each.size for each in tensors if each.name == "token_embd.weight")
        read = weights - (0 if spec.tied else table)
        kind = ", ".join(sorted({each.type for each in tensors if len(each.shape) > 1}))
    else:
        half = files.gguf is None and stored_dtypes(files.weights) <= HALF_NAMES
        if kind == "auto":
            kind = "bf16" if half and "bf16" in cpu_flags() else "fp32"
        read = _BYTES[kind] * (sum(sizes.values()) - (0 if spec.tied else sizes[EMBED]))
        weights = read + sizes[EMBED] * (2 if half or kind == "bf16" else 4)
    bandwidth = _bandwidth(threads) if threads else None
    each = 4 if kind in {"fp32", "F32"} else 2
    return ModelForecast(
        kind=kind,
        parameters=sum(sizes.values()),
        disk_bytes=sum(path.stat().st_size for path in files.weights),
        weight_bytes=int(weights),
        token_bytes=2 * spec.layers * spec.kv_heads * spec.head_dim * each,
        context=files.context,
        bandwidth=bandwidth,
        tokens_per_s=None if bandwidth is None else _SHARE * bandwidth / read,
    )


def _bandwidth(threads: int) -> float | None:
    """Return the bytes a second that `threads` threads read from memory; None without the kernels for it."""
    import ctypes  # noqa: PLC0415
    import time  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415 - only here

    from engine.models.decoders.compiled_decoder import load_kernels  # noqa: PLC0415

    kernels = load_kernels()
    if kernels is None:
        return None
    numbers = np.ones(_SAMPLE, np.float32)
    best = math.inf
    for _ in range(4):
        begun = time.perf_counter()
        at, count = ctypes.c_void_p(numbers.ctypes.data), ctypes.c_int64(_SAMPLE)
        kernels.spillway_read(at, count, threads)
        best = min(best, time.perf_counter() - begun)
    return numbers.nbytes / best
