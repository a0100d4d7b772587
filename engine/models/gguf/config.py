"""The configuration and the tensor names of a GGUF file, translated to those of `config.json` and safetensors.

Module `architectures` holds the differences between architectures.
"""

from __future__ import annotations

import math
import re
from typing import Any

from common.errors import ConfigError
from engine.models.gguf.architectures import ARCHITECTURES, Architecture
from engine.models.gguf.keys import ArchitectureKeys
from engine.models.gguf.reader import GgufFile

_ROPE_FACTORS = "rope_freqs.weight"
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?(\w+)\.(weight|bias)")


def architecture(file: GgufFile) -> Architecture:
    """Return the file's architecture; ConfigError if it is not in ARCHITECTURES, or the file is a part of a model."""
    found = file.text("general.architecture", "")
    if found not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture is {found!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    kind = file.text("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file.path}: general.type is {kind!r}; expected a whole model")
    parts = file.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise ConfigError(
            f"{file.path}: is one of {parts} files; expected one file (llama-gguf-split --merge joins them)"
        )
    return ARCHITECTURES[found]


def huggingface_config(file: GgufFile) -> dict[str, Any]:
    """Return the contents of the model's `config.json`; ConfigError names a key that is missing or out of range."""
    of, name = architecture(file), file.text("general.architecture", "")
    keys = ArchitectureKeys(file, name)
    layers, hidden = keys.count("block_count"), keys.count("embedding_length")
    if layers > len(file.tensors):
        raise ConfigError(
            f"{file.path}: {name}.block_count is {layers}, of which the file has no tensors"
        )
    heads = keys.count("attention.head_count")
    dim = keys.count("attention.key_length", hidden // heads)
    for other in ("attention.value_length", *(() if of.own_rope else ("rope.dimension_count",))):
        if keys.count(other, dim) != dim:
            raise ConfigError(
                f"{file.path}: {name}.{other} is {keys.count(other)}; expected {dim}, a head's dimensions"
            )
    if keys.count("expert_count", 0, least=0):
        raise ConfigError(f"{file.path}: a mixture of experts is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing, or no matrix")
    positions = keys.count("context_length")
    config: dict[str, Any] = {
        "model_type": of.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": dim,
        "intermediate_size": keys.count("feed_forward_length"),
        "max_position_embeddings": positions,
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope(file, keys, positions, dim),
    }
    return config | of.fields(keys, config)


def huggingface_name(name: str, of: Architecture) -> str | None:
    """Return a tensor's name in safetensors files; None for a tensor that the forward pass does not read."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    found = _WHOLE.get(part) if layer is None else of.parts.get(part, _LAYER.get(part))
    if found is None:
        return None
    return f"{found}.{kind}" if layer is None else f"model.layers.{layer}.{found}.{kind}"


def _rope(
    file: GgufFile, keys: ArchitectureKeys, positions: int, dim: int
) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    if kind == "longrope" and architecture(file).own_rope:
        return None
    if kind not in {"none", "linear", "yarn"}:
        raise ConfigError(
            f"{file.path}: rope.scaling.type is {kind!r}; expected none, linear or yarn"
        )
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        if factors.type != "F32" or factors.shape != (dim // 2,) or kind != "none":
            raise ConfigError(
                f"{file.path}: tensor {_ROPE_FACTORS!r} is not {dim // 2} numbers in F32, or stands beside {kind}"
            )
        divisors = file.rows(factors).view("<f4")[0].tolist()
        return {"rope_type": "divided", "factors": divisors}
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.count(
            "rope.scaling.original_context_length", positions
        )
        for name in ("beta_fast", "beta_slow"):
            value = keys.number(f"rope.scaling.yarn_{name}", 0.0)
            if value:
                scaling[name] = value
        times = keys.number("rope.scaling.attn_factor", 1.0)
        if times != 1 and factor > 1:
            scaling["attention_factor"] = times * (0.1 * math.log(factor) + 1)
    return scaling
