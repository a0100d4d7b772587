"""The weights of a decoder, loaded from safetensors under Hugging Face's names, with every shape checked."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import safetensors
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.decoders.spec import DecoderSpec

T = TypeVar("T")
HALF_NAMES = frozenset({"BF16", "F16"})  # as safetensors names them
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = HALF_NAMES | {"F32", "F64"}
_JOINED_FAMILIES = frozenset({"phi3"})  # projections that share their input are stored as one
_WRAPPED_FAMILIES = frozenset({"gemma3"})  # stored as part of a larger model
_WRAPPERS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


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
    """Return the tensors named by `wanted`, and `lm_head.weight` if a tied model is stored with a different head.

    ConfigError names a tensor that is missing, misshapen or not finite; names and shapes are checked before any tensor
    is read.
    """
    sources = _sources(spec, paths)
    weights: dict[str, Tensor] = {}
    for path in paths:
        with _opened(path) as file:
            for name, source in sources.items():
                if source.path == path:
                    tensor = file.get_tensor(source.stored)[source.rows]
                    weights[name] = _finite(tensor, name, path).to(device=device, dtype=dtype)
    if spec.tied and (head := weights.get(HEAD)) is not None and head.equal(weights[EMBED]):
        del weights[HEAD]
    return weights


def wanted(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor that the forward pass reads."""
    hidden, dim = spec.hidden, spec.head_dim
    wide, narrow = spec.heads * dim, spec.kv_heads * dim
    yield EMBED, (spec.vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    if not spec.tied:
        yield HEAD, (spec.vocabulary, hidden)
    for layer in range(spec.layers):
        base = f"model.layers.{layer}"
        for norm in norm_names(spec):
            if norm is not None:
                yield f"{base}.{norm}.weight", (hidden,)
        attention = f"{base}.self_attn"
        yield from _linear(f"{attention}.q_proj", wide, hidden, bias=spec.qkv_bias)
        yield from _linear(f"{attention}.k_proj", narrow, hidden, bias=spec.qkv_bias)
        yield from _linear(f"{attention}.v_proj", narrow, hidden, bias=spec.qkv_bias)
        yield from _linear(f"{attention}.o_proj", hidden, wide, bias=spec.out_bias)
        if spec.qk_norm:
            whole = spec.qk_norm == "whole"
            yield f"{attention}.q_norm.weight", (wide if whole else dim,)
            yield f"{attention}.k_norm.weight", (narrow if whole else dim,)
        for part, out, into in (
            ("gate", spec.intermediate, hidden),
            ("up", spec.intermediate, hidden),
            ("down", hidden, spec.intermediate),
        ):
            yield from _linear(f"{base}.mlp.{part}_proj", out, into, bias=spec.mlp_bias)


class LayerNorms(NamedTuple, Generic[T]):
    """A layer's norms: before and after attention, before and after the MLP; None: no norm there."""

    before_attention: T | None
    after_attention: T | None
    before_mlp: T | None
    after_mlp: T | None


_NORMS = {
    "before": LayerNorms("input_layernorm", None, "post_attention_layernorm", None),
    "after": LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": LayerNorms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def norm_names(spec: DecoderSpec) -> LayerNorms[str]:
    """Return the names of a layer's norms."""
    return _NORMS[spec.norms]


def embed_scale(spec: DecoderSpec, dtype: torch.dtype) -> float:
    """Return the factor of token embeddings for activations of this data type."""
    if spec.embed_scale_rounded:
        return float(torch.tensor(spec.embed_scale, dtype=dtype))
    return spec.embed_scale


def _linear(name: str, out: int, into: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


class _Source(NamedTuple):
    """A tensor's place: the file, the name of the stored tensor, and the rows in it."""

    path: Path
    stored: str
    rows: slice


def _sources(spec: DecoderSpec, paths: Sequence[Path]) -> dict[str, _Source]:
    """Find every wanted tensor by the files' headers; ConfigError names one that is missing or misshapen."""
    expected = dict(wanted(spec))
    if spec.tied:  # transformers uses a tied model's stored head if it differs
        expected[HEAD] = (spec.vocabulary, spec.hidden)
    joined = joined_names(spec)
    found: dict[str, _Source] = {}
    for path in paths:
        with _opened(path) as file:
            for stored in file.keys():  # noqa: SIM118
                name = _plain(stored) if spec.family in _WRAPPED_FAMILIES else stored
                parts = joined.get(name, (name,))
                if parts[0] not in expected:
                    continue
                sizes = [expected[part][0] for part in parts]
                _check_header(file, stored, (sum(sizes), *expected[parts[0]][1:]), path)
                begins = accumulate(sizes, initial=0)
                for part, begin, size in zip(parts, begins, sizes, strict=False):
                    found[part] = _Source(path, stored, slice(begin, begin + size))
    if spec.tied and EMBED not in found and HEAD in found:
        found[EMBED] = found.pop(HEAD)
    for name in expected:
        if name not in found and not (spec.tied and name == HEAD):
            raise ConfigError(
                f"{paths[0].parent}: tensor {name!r} is missing in the safetensors files"
            )
    return found


def joined_names(spec: DecoderSpec) -> dict[str, tuple[str, ...]]:
    """Return the names of tensors that are stored joined, by the name of the stored tensor."""
    found: dict[str, tuple[str, ...]] = {}
    if spec.family not in _JOINED_FAMILIES:
        return found
    for layer in range(spec.layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found[f"{attention}.qkv_proj.weight"] = tuple(f"{attention}.{n}_proj.weight" for n in "qkv")
        found[f"{mlp}.gate_up_proj.weight"] = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    return found


def _plain(stored: str) -> str:
    """Return a tensor's name without the prefix of the larger model around the text model."""
    for prefix, plain in _WRAPPERS.items():
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def _check_header(file: Any, stored: str, shape: tuple[int, ...], path: Path) -> None:
    header = file.get_slice(stored)
    if (found := tuple(header.get_shape())) != shape:
        raise ConfigError(f"{path}: tensor {stored!r} has shape {found}; expected {shape}")
    if header.get_dtype() not in _FLOATS:
        raise ConfigError(
            f"{path}: tensor {stored!r} is {header.get_dtype()}; expected fp32, bf16 or fp16"
        )


def _finite(tensor: Tensor, name: str, path: Path) -> Tensor:
    # A finite sum proves in one pass that all numbers are finite; an infinite sum may be a mere overflow.
    if not math.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise ConfigError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; any fault of the file is a ConfigError."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: {error}; expected an intact safetensors file") from error
