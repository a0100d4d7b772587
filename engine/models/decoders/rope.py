"""Rotary positions as a model's configuration describes them; no tensors here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError

SUPPORTED = ("default", "linear", "llama3", "yarn")
_NEEDS = {
    "default": (),
    "divided": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeSpec:
    """One model's rotation: `kind` is one of SUPPORTED, `original` the context it was first trained for.

    `attention` scales cosines and sines (yarn); `divisors` are of the frequencies one by one (`divided`, as GGUF files
    have them); what a kind does not use keeps its default.
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
    divisors: tuple[float, ...] = ()


def parse_rope(config: Mapping[str, Any], *, positions: int, where: str) -> RopeSpec:
    """Read `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones).

    ConfigError for a kind that is not SUPPORTED, or a number that is missing or makes no sense.
    """
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given, kind = _given(config, name, where)
    where = f"{where}: {name}"
    for key in _NEEDS[kind]:
        _number(given, key, None, where)
    theta = _number(given, "rope_theta", config.get("rope_theta") or 10_000.0, where)
    original = _number(
        given,
        "original_max_position_embeddings",
        config.get("original_max_position_embeddings") or positions,
        where,
    )
    spec = RopeSpec(kind=kind, theta=theta)
    if kind == "default":
        return spec
    if kind == "divided":
        return dataclasses.replace(spec, divisors=_divisors(given, where))
    spec = dataclasses.replace(
        spec,
        factor=_number(given, "factor", 1.0, where),
        original=int(original),
        low=_number(given, "low_freq_factor", 1.0, where),
        high=_number(given, "high_freq_factor", 4.0, where),
        fast=_number(given, "beta_fast", 32.0, where),
        slow=_number(given, "beta_slow", 1.0, where),
        truncate=bool(given.get("truncate", True)),
    )
    if kind == "llama3" and spec.high <= spec.low:
        raise ConfigError(f"{where}: high_freq_factor must be larger than low_freq_factor")
    if kind == "yarn":
        if spec.theta <= 1:
            raise ConfigError(f"{where}: rope_theta is {spec.theta:g}; yarn expects more than 1")
        spec = dataclasses.replace(spec, attention=_yarn_attention(given, spec.factor, where))
    return spec


def _given(config: Mapping[str, Any], name: str, where: str) -> tuple[dict[str, Any], str]:
    """Return the configuration's object of rotary parameters and their kind, one of SUPPORTED."""
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: {name} is {given!r}; expected an object")
    if "full_attention" in given or "sliding_attention" in given:
        given = _same_for_all(given, f"{where}: {name}")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _NEEDS:
        raise ConfigError(
            f"{where}: {name} has rope_type {kind!r}; supported are {', '.join(SUPPORTED)}"
        )
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = given.get(key, config.get(key))
        if share is not None and share != 1:
            raise ConfigError(f"{where}: {key} is {share!r}; only whole heads can be rotated (1.0)")
    return given, kind


def _divisors(given: Mapping[str, Any], where: str) -> tuple[float, ...]:
    found = given.get("divisors")
    if not isinstance(found, list) or not all(
        isinstance(each, float) and 0 < each < math.inf for each in found
    ):
        raise ConfigError(f"{where} has divisors that are not all positive numbers")
    return tuple(found)


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


def _same_for_all(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    kinds = [value for value in given.values() if isinstance(value, dict)]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise ConfigError(f"{where} differs between layers; expected one for all")
    return kinds[0]


def _number(given: Mapping[str, Any], key: str, default: Any, where: str) -> float:
    value = given.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ConfigError(f"{where} has {key} {value!r}; expected a positive number")
    return float(value)
