"""Architectures of GGUF files: the `model_type`, configuration fields and tensor names of each.

A field that a file leaves out has llama.cpp's default for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from common.errors import ConfigError
from engine.models.gguf.keys import ArchitectureKeys

Fields = dict[str, Any]
_MLP_NORM = {"ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AROUND = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
# Layers of the largest Gemma models, whose scores are scaled by hidden / heads instead of the head's dimension.
_LARGEST_GEMMA2, _LARGEST_GEMMA3 = 46, 62


def _nothing(_keys: ArchitectureKeys, _config: Fields) -> Fields:
    return {}


class Architecture(NamedTuple):
    """One architecture; `fields` returns the configuration fields that it adds to the usual ones or overrides.

    `neighbours`: the file's rotation pairs neighbouring dimensions, while Hugging Face's pairs the halves of a head.
    `parts` maps the names of a layer's tensors that differ from the usual ones. `own_rope`: `fields` reads the rotation
    itself, since it may cover a part of each head and have tensors of factors.
    """

    model_type: str
    neighbours: bool = False
    parts: Mapping[str, str] = _MLP_NORM
    fields: Callable[[ArchitectureKeys, Fields], Fields] = _nothing
    own_rope: bool = False


def _llama(keys: ArchitectureKeys, _config: Fields) -> Fields:
    window = keys.count("attention.sliding_window", 0, least=0)
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _granite(keys: ArchitectureKeys, config: Fields) -> Fields:
    # 0 and absence both mean the default
    return {
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": keys.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
    }


def _olmo2(keys: ArchitectureKeys, _config: Fields) -> Fields:
    if keys.count("attention.sliding_window", 0, least=0):
        raise keys.wrong("attention.sliding_window", "none (OLMo 3 is not supported)")
    return {}


def _gemma2(keys: ArchitectureKeys, config: Fields) -> Fields:
    return {
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _scalar(config, _LARGEST_GEMMA2),
    }


def _gemma3(keys: ArchitectureKeys, config: Fields) -> Fields:
    theta = {"rope_theta": config["rope_theta"]}
    everywhere = {"rope_type": "default"} | (config["rope_scaling"] or {}) | theta
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    return {
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _scalar(config, _LARGEST_GEMMA3),
        "rope_scaling": None,
        "rope_parameters": {"full_attention": everywhere, "sliding_attention": local},
    }


def _scalar(config: Fields, largest: int) -> float:
    whole: int = config["hidden_size"] // config["num_attention_heads"]
    return whole if config["num_hidden_layers"] == largest else config["head_dim"]


def _phi3(keys: ArchitectureKeys, config: Fields) -> Fields:
    if config["rope_scaling"] is not None:
        raise keys.wrong("rope.scaling.type", "none or longrope")
    dim, positions = config["head_dim"], config["max_position_embeddings"]
    turning = keys.count("rope.dimension_count", dim)
    if turning > dim or turning % 2:
        raise keys.wrong("rope.dimension_count", f"an even number of at most {dim}")
    share = min(1.0, math.nextafter(turning / dim, 1.0))
    rope: Fields = {"rope_type": "default", "partial_rotary_factor": share}
    original = keys.count("rope.scaling.original_context_length", positions)
    if "rope_factors_short.weight" in keys.file.tensors:
        for kind in ("short", "long"):
            rope[f"{kind}_factor"] = _factors(keys, f"rope_factors_{kind}.weight", turning // 2)
        rope["rope_type"] = "longrope"
        if keys.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return {
        "sliding_window": keys.count("attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": original,
        "rope_scaling": None,
        "rope_parameters": rope | {"rope_theta": config["rope_theta"]},
    }


def _factors(keys: ArchitectureKeys, name: str, count: int) -> list[float]:
    tensor = keys.file.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (count,):
        raise ConfigError(f"{keys.file.path}: tensor {name!r} is not {count} numbers in F32")
    found: list[float] = keys.file.rows(tensor).view("<f4")[0].tolist()
    return found


ARCHITECTURES = {
    "llama": Architecture("llama", neighbours=True, fields=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", parts=_NORMS_AROUND, fields=_gemma2),
    "gemma3": Architecture("gemma3_text", parts=_NORMS_AROUND, fields=_gemma3),
    "phi3": Architecture(
        "phi3",
        parts={**_MLP_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields=_phi3,
        own_rope=True,
    ),
    "olmo2": Architecture("olmo2", parts=_NORMS_AFTER, fields=_olmo2),
    "granite": Architecture("granite", neighbours=True, fields=_granite),
    "smollm3": Architecture("smollm3", neighbours=True),
}
