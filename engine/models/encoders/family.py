"""The families of encoders: turn each family's `config.json` into an EncoderSpec, as transformers reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import ConfigError
from engine.models.encoders.spec import Activation, EncoderSpec, Pooling

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_MOST = 1 << 24  # layers, sizes or tokens: a larger number is a mistake
_BUCKETS = 32  # buckets of distances, fixed in MPNet's code
_LOCAL_ATTENTION = 128
Fields = dict[str, Any]


def parse_spec(
    config: Mapping[str, Any], *, pooling: Pooling, normalise: bool, where: str
) -> EncoderSpec:
    """Build the spec from a `config.json`; ConfigError names the field that cannot be served."""
    kind = config.get("model_type")
    parse = FAMILIES.get(kind) if isinstance(kind, str) else None
    if parse is None:
        raise ConfigError(f"{where}: model_type is {kind!r}; expected one of {', '.join(FAMILIES)}")
    if config.get("is_decoder"):
        raise ConfigError(
            f"{where}: is_decoder is {config['is_decoder']!r}, so a token would not see those after it; expected false"
        )
    spec = dataclasses.replace(parse(dict(config), where), pooling=pooling, normalise=normalise)
    if min(spec.layers, spec.hidden, spec.heads, spec.intermediate, spec.vocabulary) < 1:
        raise ConfigError(f"{where}: layers, sizes and vocab_size must be at least 1")
    if spec.hidden % spec.heads or spec.max_positions < 1 or config.get("type_vocab_size") == 0:
        raise ConfigError(
            f"{where}: hidden_size {spec.hidden} must be a multiple of num_attention_heads "
            f"{spec.heads}, and the position and type tables must not be empty"
        )
    return spec


def _bert(config: Fields, where: str) -> EncoderSpec:
    return _absolute(config, where, "bert", offset=0, labels=_labels(config, where))


def _roberta(config: Fields, where: str) -> EncoderSpec:
    pad = _integer(config, "pad_token_id", where, 1)
    return _absolute(config, where, "xlmr", offset=pad + 1, labels=_labels(config, where))


def _distilbert(config: Fields, where: str) -> EncoderSpec:
    """Build the spec of a DistilBERT: BERT with other field names, and without token types."""
    names = {
        "num_hidden_layers": ("n_layers", 6),
        "hidden_size": ("dim", 768),
        "num_attention_heads": ("n_heads", 12),
        "intermediate_size": ("hidden_dim", 3072),
        "hidden_act": ("activation", "gelu"),
    }
    plain = {name: config.get(own, default) for name, (own, default) in names.items()}
    plain |= {"vocab_size": 30_522, "max_position_embeddings": 512}
    config = {**plain, **config, "type_vocab_size": 0, "layer_norm_eps": 1e-12}
    return _absolute(config, where, "distilbert", offset=0, labels=_none(config, where))


def _mpnet(config: Fields, where: str) -> EncoderSpec:
    """Build the spec of an MPNet: RoBERTa's positions, and score biases by distance; no token types."""
    defaults = {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30_527,
        "max_position_embeddings": 512,
    }
    buckets = _integer(config, "relative_attention_num_buckets", where, _BUCKETS)
    if buckets != _BUCKETS:
        raise ConfigError(
            f"{where}: relative_attention_num_buckets is {buckets}; expected {_BUCKETS}"
        )
    config = {**defaults, **config, "type_vocab_size": 0}
    spec = _absolute(config, where, "mpnet", offset=2, labels=_none(config, where))
    return dataclasses.replace(spec, relative_buckets=_BUCKETS)


def _nomic(config: Fields, where: str) -> EncoderSpec:
    """Build the spec of a Nomic encoder: rotations, a gated MLP, and biases in norms only."""
    defaults = {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30_528,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }
    config = {**defaults, **config}
    spec = _shape(
        config, where, "nomic_bert", epsilon="layer_norm_eps", labels=_none(config, where)
    )
    theta = _theta(config.get("rope_scaling") or config.get("rope_parameters") or {}, where)
    theta = _theta(config, where) if theta is None else theta
    return dataclasses.replace(
        spec,
        thetas=(1000.0 if theta is None else theta,) * spec.layers,
        position_table=False,
        gated=True,
        biased=False,
    )


def _modernbert(config: Fields, where: str) -> EncoderSpec:
    """Build the spec of a ModernBERT: norms before attention and MLP, rotations, windows, a gated MLP, no biases."""
    for name in ("norm_bias", "attention_bias", "mlp_bias"):
        if config.get(name):
            raise ConfigError(f"{where}: {name} is {config[name]!r}; expected false")
    defaults = {
        "num_hidden_layers": 22,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "vocab_size": 50_368,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu",
    }
    config = {**defaults, **config, "type_vocab_size": 0}
    config["hidden_act"] = config["hidden_activation"]
    spec = _shape(config, where, "modernbert", epsilon="norm_eps", labels=_none(config, where))
    every = _integer(config, "global_attn_every_n_layers", where, 3) or 1
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if n % every else "full_attention" for n in range(spec.layers)]
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != spec.layers
        or any(k not in known for k in kinds)
    ):
        raise ConfigError(f"{where}: layer_types must be a list of {spec.layers}, each of {known}")
    window = _integer(config, "local_attention", where, _LOCAL_ATTENTION) // 2
    bases = {
        kind: _base(config, kind, older, default, where)
        for kind, older, default in (
            ("full_attention", "global_rope_theta", 160_000.0),
            ("sliding_attention", "local_rope_theta", 10_000.0),
        )
    }
    return dataclasses.replace(
        spec,
        thetas=tuple(bases[kind] for kind in kinds),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        position_table=False,
        norms="before",
        gated=True,
        biased=False,
        norms_biased=False,
    )


# By `model_type`.
FAMILIES: dict[str, Callable[[Fields, str], EncoderSpec]] = {
    "bert": _bert,
    "xlm-roberta": _roberta,
    "roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "nomic_bert": _nomic,
    "modernbert": _modernbert,
}


def _absolute(config: Fields, where: str, family: str, *, offset: int, labels: int) -> EncoderSpec:
    """Return the spec of an encoder with a table of position embeddings."""
    position = config.get("position_embedding_type") or "absolute"
    if position != "absolute":
        raise ConfigError(f"{where}: position_embedding_type is {position!r}; expected 'absolute'")
    spec = _shape(config, where, family, epsilon="layer_norm_eps", labels=labels)
    return dataclasses.replace(spec, position_offset=offset)


def _shape(config: Fields, where: str, family: str, *, epsilon: str, labels: int) -> EncoderSpec:
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{where}: hidden_act is {activation!r}; expected one of {known}")
    small = config.get(epsilon, 1e-5 if epsilon == "norm_eps" else 1e-12)
    if not isinstance(small, int | float) or not 0 < small < 1:
        raise ConfigError(f"{where}: {epsilon} is {small!r}; expected a small number")
    return EncoderSpec(
        family=family,
        layers=_integer(config, "num_hidden_layers", where),
        hidden=_integer(config, "hidden_size", where),
        heads=_integer(config, "num_attention_heads", where),
        intermediate=_integer(config, "intermediate_size", where),
        vocabulary=_integer(config, "vocab_size", where),
        positions=_integer(config, "max_position_embeddings", where),
        position_offset=0,
        types=_integer(config, "type_vocab_size", where, 2),
        activation=_ACTIVATIONS[activation],
        epsilon=float(small),
        labels=labels,
        pooling="mean",
        normalise=False,
    )


def _integer(config: Fields, name: str, where: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ConfigError(f"{where}: {name} is {value!r}; expected a whole number up to {_MOST}")
    return value


def _labels(config: Fields, where: str) -> int:
    if not _classifies(config):
        return 0
    labels = config.get("id2label") or {}
    return _integer(config, "num_labels", where, len(labels) or 2)


def _none(config: Fields, where: str) -> int:
    """Return 0 labels; ConfigError for a classification head, which is not supported in this family."""
    if _classifies(config):
        raise ConfigError(
            f"{where}: architectures is {config['architectures']!r}; expected a model without a classification head"
        )
    return 0


def _classifies(config: Fields) -> bool:
    names = config.get("architectures") or []
    return any("SequenceClassification" in str(name) for name in names)


def _theta(given: Any, where: str) -> float | None:
    """Return the base of a plain rotation, None if the file has none; ConfigError for another kind of rotation."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: rope_parameters is {given!r}; expected an object")
    kind = given["rope_type"] if "rope_type" in given else given.get("type", "default")
    if kind != "default":
        raise ConfigError(f"{where}: rope_type is {kind!r}; expected default")
    theta = given.get("rope_theta")
    if theta is None:
        return None
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < 1e12:
        raise ConfigError(f"{where}: rope_theta is {theta!r}; expected a positive number")
    return float(theta)


def _base(config: Fields, kind: str, older: str, default: float, where: str) -> float:
    """Return the base of the rotation of one kind of layers."""
    if config.get("rope_scaling") is not None:
        raise ConfigError(f"{where}: rope_scaling is {config['rope_scaling']!r}; expected none")
    given = config.get("rope_parameters") or {}
    found = _theta(given.get(kind) or {} if isinstance(given, dict) else given, where)
    if found is None:
        found = _theta({"rope_theta": config.get(older)}, where)
    return default if found is None else found
