"""Rotary positions, read from a model's configuration; no tensors here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NEEDS = {
    "default": (),
    "divided": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
_BY_LAYER = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotation: `kind` is one of SUPPORTED, `original` the context of the model's first training, in tokens.

    `attention` scales cosines and sines (yarn, longrope); `share` is the rotated part of a head, from its beginning.
    `factors` divide the frequencies one by one (longrope, in texts up to the `original` context; divided, from GGUF
    files). `long_factors` replace them at all positions of longer texts; they are empty if no text can be longer, or if
    they equal `factors`. Fields that a kind does not use keep their defaults.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention: float = 1.0
    share: float = 1.0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def short_context(self) -> int:
        """The length in tokens beyond which a text uses `long_factors` at all positions; 0: no text does."""
        return self.original if self.long_factors else 0


def parse_rope(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    positions: int,
    where: str,
) -> RopeSpec:
    """Read the rotation that all layers share, from `rope_scaling`, else `rope_parameters`, as transformers does.

    ConfigError for a kind that is not SUPPORTED, a number that is missing or out of range, a rotation per layer, and a
    rotation of only part of each head.
    """
    given, name = rope_parameters(config, where)
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = given.get(key, config.get(key))
        if share is not None and share != 1:
            raise ConfigError(f"{where}: {key} is {share!r}; only whole heads can be rotated (1.0)")
    return read_rope(
        given,
        head_dim=head_dim,
        positions=positions,
        where=f"{where}: {name}",
        theta=config.get("rope_theta", 10_000.0),
        original=config.get("original_max_position_embeddings"),
    )


def rope_parameters(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Return the parameters of the rotation that all layers share, and the name of the field that holds them."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(name)
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: {name} is {given!r}; expected an object")
    if any(kind in given for kind in _BY_LAYER):
        raise ConfigError(
            f"{where}: {name} differs between layers; expected one for all in this family"
        )
    return given, name


def read_rope(
    given: Mapping[str, Any],
    *,
    head_dim: int,
    positions: int,
    where: str,
    theta: Any,
    original: Any = None,
    share: float = 1.0,
) -> RopeSpec:
    """Read one object of parameters; `original`, if not None, overrides the original context in the object.

    `share` of a head's dimensions are rotated. ConfigError as for `parse_rope`.
    """
    kind = given["rope_type"] if "rope_type" in given else given.get("type", "default")
    if kind not in _NEEDS:
        raise ConfigError(f"{where} has rope_type {kind!r}; supported are {', '.join(SUPPORTED)}")
    for key in _NEEDS[kind]:
        _number(given, key, None, where)
    theta = _number(given, "rope_theta", theta, where)
    if original is not None:
        given = {**given, "original_max_position_embeddings": original}
    trained = _number(given, "original_max_position_embeddings", positions, where)
    spec = RopeSpec(kind=kind, theta=theta, share=share)
    if kind == "default":
        return spec
    if kind == "divided":
        return dataclasses.replace(spec, factors=_factors(given, "factors", head_dim, where))
    spec = dataclasses.replace(
        spec,
        factor=_number(given, "factor", 1.0, where),
        original=int(trained),
        low=_number(given, "low_freq_factor", 1.0, where),
        high=_number(given, "high_freq_factor", 4.0, where),
        fast=_number(given, "beta_fast", 32.0, where),
        slow=_number(given, "beta_slow", 1.0, where),
        truncate=bool(given.get("truncate", True)),
    )
    dim = int(head_dim * share)
    if kind == "dynamic":
        return _dynamic(spec, dim, positions, where)
    if kind == "longrope":
        return _longrope(spec, given, dim, positions, where)
    if kind == "llama3" and spec.high <= spec.low:
        raise ConfigError(f"{where}: high_freq_factor must be larger than low_freq_factor")
    if kind == "yarn":
        if spec.theta <= 1:
            raise ConfigError(f"{where}: rope_theta is {spec.theta:g}; yarn expects more than 1")
        spec = dataclasses.replace(spec, attention=_yarn_attention(given, spec.factor, where))
    return spec


def _dynamic(spec: RopeSpec, dim: int, positions: int, where: str) -> RopeSpec:
    """Return the plain rotation to which NTK scaling by length amounts within a model's context."""
    if dim <= 2:
        raise ConfigError(f"{where} has rope_type 'dynamic'; expected heads of more than 2 numbers")
    length = spec.factor * positions / positions - (spec.factor - 1)  # 1 except for rounding
    stretched = length ** (dim / (dim - 2))
    return RopeSpec(kind="default", theta=spec.theta * stretched, share=spec.share)


def _longrope(
    spec: RopeSpec, given: Mapping[str, Any], dim: int, positions: int, where: str
) -> RopeSpec:
    """Read the factors for texts up to the original context, and those for longer texts (LongRoPE, section 3.2)."""
    factors = _factors(given, "short_factor", dim, where)
    beyond = _factors(given, "long_factor", dim, where)
    if spec.original < 2:
        raise ConfigError(
            f"{where} has original_max_position_embeddings {spec.original}; expected at least 2"
        )
    stretched = positions / spec.original if given.get("factor") is None else spec.factor
    attention = 1.0
    if given.get("attention_factor") is not None:
        attention = _number(given, "attention_factor", None, where)
    elif stretched > 1:
        attention = math.sqrt(1 + math.log(stretched) / math.log(spec.original))
    differs = beyond != factors and spec.original < positions
    return dataclasses.replace(
        spec, attention=attention, factors=factors, long_factors=beyond if differs else ()
    )


def _factors(given: Mapping[str, Any], key: str, dim: int, where: str) -> tuple[float, ...]:
    """Return the factors: one positive number for every two rotated dimensions."""
    factors = given.get(key)
    if (
        not isinstance(factors, list)
        or len(factors) != -(-dim // 2)
        or not all(
            isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < math.inf
            for each in factors
        )
    ):
        raise ConfigError(f"{where} has {key} {factors!r:.80}; expected {-(-dim // 2)} numbers")
    return tuple(float(each) for each in factors)


def _yarn_attention(given: Mapping[str, Any], factor: float, where: str) -> float:
    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor", None, where)
    scale, every = given.get("mscale"), given.get("mscale_all_dim")
    if scale and every:
        numerator = _mscale(factor, _number(given, "mscale", None, where))
        return numerator / _mscale(factor, _number(given, "mscale_all_dim", None, where))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _number(given: Mapping[str, Any], key: str, default: Any, where: str) -> float:
    value = given.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ConfigError(f"{where} has {key} {value!r}; expected a positive number")
    return float(value)
