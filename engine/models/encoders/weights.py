"""The weights of an encoder, loaded from safetensors and renamed to BERT's names, with every shape checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.encoders.files import ModelFiles
from engine.models.encoders.spec import EncoderSpec

_PREFIXES = ("bert.", "roberta.", "distilbert.", "mpnet.", "nomic_bert.", "model.")
# Renaming to BERT's names: a pattern, and its replacement, or the names of the equal parts of a joined tensor.
_Renaming = tuple[str, str | tuple[str, ...]]
_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
_RENAMED: dict[str, tuple[_Renaming, ...]] = {
    "distilbert": (
        (r"^transformer\.layer\.", "encoder.layer."),
        (r"attention\.q_lin", _QKV[0]),
        (r"attention\.k_lin", _QKV[1]),
        (r"attention\.v_lin", _QKV[2]),
        (r"attention\.out_lin", "attention.output.dense"),
        (r"sa_layer_norm", "attention.output.LayerNorm"),
        (r"ffn\.lin1", "intermediate.dense"),
        (r"ffn\.lin2", "output.dense"),
        (r"output_layer_norm", "output.LayerNorm"),
    ),
    "mpnet": (
        (r"attention\.attn\.q", _QKV[0]),
        (r"attention\.attn\.k", _QKV[1]),
        (r"attention\.attn\.v", _QKV[2]),
        (r"attention\.attn\.o", "attention.output.dense"),
        (r"attention\.LayerNorm", "attention.output.LayerNorm"),
    ),
    "nomic_bert": (
        (r"^(encoder\.)?layers\.", "encoder.layer."),
        (r"^emb_ln", "embeddings.LayerNorm"),
        (r"self_attn\.q_proj", _QKV[0]),
        (r"self_attn\.k_proj", _QKV[1]),
        (r"self_attn\.v_proj", _QKV[2]),
        (r"self_attn\.o_proj|attn\.out_proj", "attention.output.dense"),
        (r"attn\.Wqkv", _QKV),
        (r"mlp\.(gate_proj|fc12)", "gate.dense"),
        (r"mlp\.(up_proj|fc11)", "intermediate.dense"),
        (r"mlp\.(down_proj|fc2)", "output.dense"),
        (r"post_attention_layernorm|norm1", "attention.output.LayerNorm"),
        (r"post_mlp_layernorm|norm2", "output.LayerNorm"),
    ),
    "modernbert": (
        (r"^layers\.", "encoder.layer."),
        (r"embeddings\.tok_embeddings", "embeddings.word_embeddings"),
        (r"embeddings\.norm", "embeddings.LayerNorm"),
        (r"attn\.Wqkv", _QKV),
        (r"attn\.Wo", "attention.output.dense"),
        (r"mlp\.Wi", ("gate.dense", "intermediate.dense")),
        (r"mlp\.Wo", "output.dense"),
        (r"attn_norm", "attention.output.LayerNorm"),
        (r"mlp_norm", "output.LayerNorm"),
    ),
}
_OLDER: tuple[_Renaming, ...] = (
    (r"LayerNorm\.gamma", "LayerNorm.weight"),
    (r"LayerNorm\.beta", "LayerNorm.bias"),
)


def load_weights(files: ModelFiles) -> dict[str, Tensor]:
    """Return fp32 tensors with the names of `wanted`, and biases of 0 where a family has no biases.

    ConfigError names a tensor that is missing or misshapen.
    """
    found: dict[str, Tensor] = {}
    for path in files.weights:
        found.update(_tensors(path, files.spec.family))
    weights: dict[str, Tensor] = {}
    for name, shape in wanted(files.spec):
        tensor = found.get(name)
        if tensor is None:
            raise ConfigError(f"{files.weights[0]}: tensor {name!r} is missing")
        weights[name] = checked(tensor, name, shape, files.weights[0])
    for name in [
        name for name in weights if name.endswith(".weight") and "embeddings." not in name
    ]:
        weights.setdefault(name.removesuffix("weight") + "bias", torch.zeros(len(weights[name])))
    weights.setdefault("embeddings.LayerNorm.bias", torch.zeros(files.spec.hidden))
    if not files.spec.types:
        weights["embeddings.token_type_embeddings.weight"] = torch.zeros(1, files.spec.hidden)
    return weights


def checked(tensor: Tensor, name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Return a tensor in fp32; ConfigError if its shape differs or a number is not finite."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}; expected {shape}"
        )
    tensor = tensor.to(torch.float32).contiguous()
    if not torch.isfinite(tensor).all():
        raise ConfigError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensor


def wanted(spec: EncoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every stored tensor that the forward pass reads."""
    hidden, inner = spec.hidden, spec.intermediate
    yield "embeddings.word_embeddings.weight", (spec.vocabulary, hidden)
    if spec.position_table:
        yield "embeddings.position_embeddings.weight", (spec.positions, hidden)
    if spec.types:
        yield "embeddings.token_type_embeddings.weight", (spec.types, hidden)
    if spec.relative_buckets:
        yield "encoder.relative_attention_bias.weight", (spec.relative_buckets, spec.heads)
    yield from _layer("embeddings.LayerNorm", hidden, bias=spec.norms_biased)
    for layer in range(spec.layers):
        base = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from _layer(f"{base}.attention.self.{part}", hidden, hidden, bias=spec.biased)
        yield from _layer(f"{base}.attention.output.dense", hidden, hidden, bias=spec.biased)
        if spec.norms == "after" or layer:
            yield from _layer(f"{base}.attention.output.LayerNorm", hidden, bias=spec.norms_biased)
        if spec.gated:
            yield from _layer(f"{base}.gate.dense", inner, hidden, bias=spec.biased)
        yield from _layer(f"{base}.intermediate.dense", inner, hidden, bias=spec.biased)
        yield from _layer(f"{base}.output.dense", hidden, inner, bias=spec.biased)
        yield from _layer(f"{base}.output.LayerNorm", hidden, bias=spec.norms_biased)
    if spec.norms == "before":
        yield from _layer("final_norm", hidden, bias=spec.norms_biased)
    if spec.labels and spec.family == "bert":
        yield from _layer("pooler.dense", hidden, hidden)
        yield from _layer("classifier", spec.labels, hidden)
    elif spec.labels:
        yield from _layer("classifier.dense", hidden, hidden)
        yield from _layer("classifier.out_proj", spec.labels, hidden)


def _layer(
    name: str, out: int, *into: int, bias: bool = True
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a linear layer, or, without inputs, of a norm."""
    yield f"{name}.weight", (out, *into)
    if bias:
        yield f"{name}.bias", (out,)


def tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file; ConfigError if the file is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: {error}; expected an intact safetensors file") from error


def _tensors(path: Path, family: str) -> dict[str, Tensor]:
    """Return the tensors of a file under BERT's names."""
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors(path).items():
        names = _plain(stored, family)
        if tensor.dim():
            found.update(zip(names, tensor.chunk(len(names)), strict=False))
    return found


def _plain(stored: str, family: str) -> list[str]:
    """Return BERT's names for a stored tensor; several names if the tensor joins equal parts."""
    for prefix in _PREFIXES:
        stored = stored.removeprefix(prefix)
    names = [stored]
    for pattern, plain in (*_RENAMED.get(family, ()), *_OLDER):
        parts = (plain,) if isinstance(plain, str) else plain
        if re.search(pattern, names[0]):
            names = [re.sub(pattern, part, names[0], count=1) for part in parts]
            if len(parts) > 1:
                break
    return names
