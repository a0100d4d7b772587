"""Load an encoder's weights from safetensors under one set of names, each shape checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.encoders.files import ModelFiles
from engine.models.encoders.spec import EncoderSpec

_PREFIXES = ("bert.", "roberta.", "model.")


def load_weights(files: ModelFiles) -> dict[str, Tensor]:
    """Return fp32 tensors named as `wanted` names them; ConfigError names the missing or misshapen one."""
    found: dict[str, Tensor] = {}
    for path in files.weights:
        found.update(_tensors(path))
    weights: dict[str, Tensor] = {}
    for name, shape in wanted(files.spec):
        tensor = found.get(name)
        if tensor is None:
            raise ConfigError(f"{files.weights[0]}: tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{files.weights[0]}: tensor {name!r} has shape {tuple(tensor.shape)}; expected {shape}"
            )
        weights[name] = tensor.to(torch.float32).contiguous()
        if not torch.isfinite(weights[name]).all():
            raise ConfigError(f"{files.weights[0]}: tensor {name!r} holds NaN or infinity")
    return weights


def wanted(spec: EncoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor the forward pass reads."""
    hidden, inner = spec.hidden, spec.intermediate
    yield "embeddings.word_embeddings.weight", (spec.vocabulary, hidden)
    yield "embeddings.position_embeddings.weight", (spec.positions, hidden)
    yield "embeddings.token_type_embeddings.weight", (spec.types, hidden)
    yield from _layer("embeddings.LayerNorm", hidden)
    for layer in range(spec.layers):
        base = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from _layer(f"{base}.attention.self.{part}", hidden, hidden)
        yield from _layer(f"{base}.attention.output.dense", hidden, hidden)
        yield from _layer(f"{base}.attention.output.LayerNorm", hidden)
        yield from _layer(f"{base}.intermediate.dense", inner, hidden)
        yield from _layer(f"{base}.output.dense", hidden, inner)
        yield from _layer(f"{base}.output.LayerNorm", hidden)
    if spec.labels and spec.family == "bert":
        yield from _layer("pooler.dense", hidden, hidden)
        yield from _layer("classifier", spec.labels, hidden)
    elif spec.labels:
        yield from _layer("classifier.dense", hidden, hidden)
        yield from _layer("classifier.out_proj", spec.labels, hidden)


def _layer(name: str, out: int, *into: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a linear layer, or of a norm, which has no inputs."""
    yield f"{name}.weight", (out, *into)
    yield f"{name}.bias", (out,)


def _tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensors[_plain(name)] = file.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: {error}; expected an intact safetensors file") from error
    return tensors


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
