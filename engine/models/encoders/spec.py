"""The shape and conventions of an encoder, read from its configuration files; no tensors here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from common.errors import ConfigError

Pooling = Literal["mean", "cls", "max"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_MOST = 1 << 24  # of layers, sizes, words: what is larger is a mistake
_FAMILIES = {"bert": "bert", "xlm-roberta": "xlmr", "roberta": "xlmr", "camembert": "xlmr"}


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Shape and conventions of one encoder; `labels` is 0 unless it has a classification head."""

    family: Literal["bert", "xlmr"]
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    position_offset: int
    types: int
    activation: Activation
    epsilon: float
    labels: int
    pooling: Pooling
    normalise: bool

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def max_positions(self) -> int:
        """Most tokens a text may have by the position table."""
        return self.positions - self.position_offset


def _integer(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ConfigError(f"{where}: {name} is {value!r}; expected a whole number up to {_MOST}")
    return value


def parse_spec(
    config: Mapping[str, Any], *, pooling: Pooling, normalise: bool, where: str
) -> EncoderSpec:
    """Build the spec from a `config.json`; ConfigError names the field that cannot be served."""
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            f"{where}: model_type is {kind!r}; expected one of {', '.join(_FAMILIES)}"
        )
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{where}: hidden_act is {activation!r}; expected one of {known}")
    position = config.get("position_embedding_type") or "absolute"
    if position != "absolute":
        raise ConfigError(f"{where}: position_embedding_type is {position!r}; expected 'absolute'")
    if config.get("is_decoder"):
        raise ConfigError(
            f"{where}: is_decoder is {config['is_decoder']!r}, so a token would not see those after it; expected false"
        )
    epsilon = config.get("layer_norm_eps", 1e-12)
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ConfigError(f"{where}: layer_norm_eps is {epsilon!r}; expected a small number")
    pad = _integer(config, "pad_token_id", where, 1 if family == "xlmr" else 0)
    spec = EncoderSpec(
        family="bert" if family == "bert" else "xlmr",
        layers=_integer(config, "num_hidden_layers", where),
        hidden=_integer(config, "hidden_size", where),
        heads=_integer(config, "num_attention_heads", where),
        intermediate=_integer(config, "intermediate_size", where),
        vocabulary=_integer(config, "vocab_size", where),
        positions=_integer(config, "max_position_embeddings", where),
        position_offset=pad + 1 if family == "xlmr" else 0,
        types=_integer(config, "type_vocab_size", where, 2),
        activation=_ACTIVATIONS[activation],
        epsilon=float(epsilon),
        labels=_labels(config, where),
        pooling=pooling,
        normalise=normalise,
    )
    if min(spec.layers, spec.hidden, spec.heads, spec.intermediate, spec.vocabulary) < 1:
        raise ConfigError(f"{where}: layers, sizes and vocab_size must be at least 1")
    if spec.hidden % spec.heads or spec.max_positions < 1 or spec.types < 1:
        raise ConfigError(
            f"{where}: hidden_size {spec.hidden} must be a multiple of num_attention_heads "
            f"{spec.heads}, and the position and type tables must not be empty"
        )
    return spec


def _labels(config: Mapping[str, Any], where: str) -> int:
    names = config.get("architectures") or []
    if not any("SequenceClassification" in str(name) for name in names):
        return 0
    labels = config.get("id2label") or {}
    return _integer(config, "num_labels", where, len(labels) or 2)
