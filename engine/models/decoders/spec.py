"""The specification of a decoder, read from its `config.json`; no tensors here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from common.errors import ConfigError
from engine.models.decoders.rope import RopeSpec, parse_rope

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
}
Activation = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_MISTRAL_WINDOW = 4096  # what transformers takes where the file says nothing


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and conventions of one decoder.

    `windows[layer]` is how many positions a row of that layer sees, itself included; None: all before it.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    epsilon: float
    activation: Activation
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @property
    def groups(self) -> list[tuple[int | None, list[int]]]:
        """Return (window, layers) of each layer group; layers with one window share a page table."""
        found: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            found.setdefault(window, []).append(layer)
        return list(found.items())


def parse_decoder(config: Mapping[str, Any], *, where: str) -> DecoderSpec:
    """Build the spec from a `config.json`; ConfigError names the field that cannot be served.

    Fields a file leaves out have the values transformers gives them.
    """
    family = _family(config, where)
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{where}: hidden_act is {activation!r}; expected one of {known}")
    epsilon = config.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ConfigError(f"{where}: rms_norm_eps is {epsilon!r}; expected a small number")
    layers = _count(config, "num_hidden_layers", where)
    hidden = _count(config, "hidden_size", where)
    heads, kv_heads, head_dim = _heads(config, family, hidden, where)
    positions = _count(config, "max_position_embeddings", where)
    bias = _flag(config, "attention_bias", where)
    return DecoderSpec(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size", where),
        vocabulary=_count(config, "vocab_size", where),
        positions=positions,
        epsilon=float(epsilon),
        activation=_ACTIVATIONS[activation],
        rope=parse_rope(config, positions=positions, where=where),
        windows=_windows(config, family, layers, where),
        # Qwen2's biases are part of its code, not of its configuration; Mistral has none
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        out_bias=bias and family in {"llama", "qwen3"},
        mlp_bias=_flag(config, "mlp_bias", where) and family == "llama",
        qk_norm=family == "qwen3",
        tied=_flag(config, "tie_word_embeddings", where),
    )


def _family(config: Mapping[str, Any], where: str) -> Family:
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: model_type is {kind!r}; supported for generation are {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{where}: quantization_config is set; expected weights in fp32, bf16 or fp16"
        )
    return family


def _heads(
    config: Mapping[str, Any], family: Family, hidden: int, where: str
) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key and value heads, and the dimensions of a head."""
    heads = _count(config, "num_attention_heads", where)
    kv_heads = _count(config, "num_key_value_heads", where, 8 if family == "mistral" else heads)
    head_dim = _count(config, "head_dim", where, 128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"{where}: head_dim is {head_dim}; expected an even number")
    return heads, kv_heads, head_dim


def _windows(
    config: Mapping[str, Any], family: Family, layers: int, where: str
) -> tuple[int | None, ...]:
    """Return each layer's window, by the family's own rule."""
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        window = _window(config, where) if "sliding_window" in config else _MISTRAL_WINDOW
        return (window,) * layers
    # Qwen: a window in the file means nothing unless use_sliding_window says so
    window = _window(config, where) if _flag(config, "use_sliding_window", where) else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = _count(config, "max_window_layers", where, 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(kinds):
        raise ConfigError(
            f"{where}: layer_types must be a list of {layers}, each full_attention or sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Mapping[str, Any], where: str) -> int | None:
    if config.get("sliding_window") is None:
        return None
    return _count(config, "sliding_window", where)


def _count(
    config: Mapping[str, Any], name: str, where: str, default: int | None = None, *, least: int = 1
) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1 << 31:
        raise ConfigError(
            f"{where}: {name} is {value!r}; expected a whole number of at least {least}"
        )
    return value


def _flag(config: Mapping[str, Any], name: str, where: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is {value!r}; expected true or false")
    return bool(value)
