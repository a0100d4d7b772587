"""Load a decoder's weights from safetensors under the names of Hugging Face, each shape checked."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.decoders.spec import DecoderSpec

HALF_NAMES = frozenset({"BF16", "F16"})  # as safetensors names them
_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def stored_dtypes(paths: Sequence[Path]) -> set[str]:
    """Return the types of the stored tensors, as safetensors names them (F32, BF16, …)."""
    found: set[str] = set()
    for path in paths:
        with _opened(path) as file:
            found.update(str(file.get_slice(name).get_dtype()) for name in file.keys())  # noqa: SIM118
    return found


def load_weights(
    spec: DecoderSpec, paths: Sequence[Path], *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors that `wanted` names; ConfigError names one that is missing, misshapen or not finite."""
    expected = dict(wanted(spec))
    weights: dict[str, Tensor] = {}
    for path in paths:
        with _opened(path) as file:
            for name in set(file.keys()) & expected.keys():
                weights[name] = _checked(file.get_tensor(name), name, expected[name], path).to(
                    device=device, dtype=dtype
                )
    for name in expected:
        if name not in weights:
            raise ConfigError(
                f"{paths[0].parent}: tensor {name!r} is missing in the safetensors files"
            )
    return weights


def wanted(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor the forward pass reads."""
    hidden, dim = spec.hidden, spec.head_dim
    wide, narrow = spec.heads * dim, spec.kv_heads * dim
    yield "model.embed_tokens.weight", (spec.vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    if not spec.tied:
        yield "lm_head.weight", (spec.vocabulary, hidden)
    for layer in range(spec.layers):
        base = f"model.layers.{layer}"
        yield f"{base}.input_layernorm.weight", (hidden,)
        yield f"{base}.post_attention_layernorm.weight", (hidden,)
        attention = f"{base}.self_attn"
        yield from _linear(f"{attention}.q_proj", wide, hidden, bias=spec.qkv_bias)
        yield from _linear(f"{attention}.k_proj", narrow, hidden, bias=spec.qkv_bias)
        yield from _linear(f"{attention}.v_proj", narrow, hidden, bias=spec.qkv_bias)
        yield from _linear(f"{attention}.o_proj", hidden, wide, bias=spec.out_bias)
        if spec.qk_norm:
            yield f"{attention}.q_norm.weight", (dim,)
            yield f"{attention}.k_norm.weight", (dim,)
        for part, out, into in (
            ("gate", spec.intermediate, hidden),
            ("up", spec.intermediate, hidden),
            ("down", hidden, spec.intermediate),
        ):
            yield from _linear(f"{base}.mlp.{part}_proj", out, into, bias=spec.mlp_bias)


def _linear(name: str, out: int, into: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}; expected {shape}"
        )
    if tensor.dtype not in _FLOATS:
        raise ConfigError(f"{path}: tensor {name!r} is {tensor.dtype}; expected fp32, bf16 or fp16")
    # A sum that is finite says so of all, in one reading; one that is not may only have run over.
    if not math.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise ConfigError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; whatever is wrong with it is a ConfigError."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: {error}; expected an intact safetensors file") from error
