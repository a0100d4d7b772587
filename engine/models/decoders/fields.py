"""The fields of a model's `config.json`, each read with its type and range checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from engine.models.decoders.spec import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_KINDS = ("full_attention", "sliding_attention")


class ConfigFields:
    """One configuration, read field by field; ConfigError names the file, the field and the expected value.

    In methods with a default, both null and an absent field have that default.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def over(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """Return the configuration with defaults for absent fields; null remains null."""
        return ConfigFields({**defaults, **self.config}, self.where)

    def wrong(self, name: str, expected: str) -> ConfigError:
        """Return the error for a field with a wrong value."""
        return ConfigError(
            f"{self.where}: {name} is {self.config.get(name)!r}; expected {expected}"
        )

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 31
    ) -> int:
        """Return a whole number."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        if value > most:
            raise self.wrong(name, f"at most {most}")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; an absent field is false, null is an error."""
        value = self.config.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
            raise self.wrong(name, "a positive number")
        return float(value)

    def cap(self, name: str) -> float:
        """Return a soft cap, 0 for none."""
        return 0.0 if self.config.get(name) is None else self.number(name)

    def epsilon(self) -> float:
        """Return `rms_norm_eps`."""
        value = self.config.get("rms_norm_eps", 1e-6)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
            raise self.wrong("rms_norm_eps", "a small number")
        return float(value)

    def activation(self, name: str) -> Activation:
        """Return the activation of the MLP."""
        value = self.config.get(name, "silu")
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.wrong(name, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def window(self) -> int | None:
        """Return `sliding_window`, None where there is none."""
        return None if self.config.get("sliding_window") is None else self.count("sliding_window")

    def layer_kinds(self, layers: int, default: Sequence[str]) -> Sequence[str]:
        """Return `layer_types`: full_attention or sliding_attention for each layer."""
        kinds = self.config.get("layer_types")
        if kinds is None:
            return default
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(kind in _KINDS for kind in kinds)
        ):
            raise ConfigError(
                f"{self.where}: layer_types must be a list of {layers}, each {' or '.join(_KINDS)}"
            )
        return kinds

    def windows(self, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """Return each layer's window by its kind; ConfigError if a layer needs a window and the file has none."""
        if window is None and "sliding_attention" in kinds:
            raise ConfigError(
                f"{self.where}: layer_types has sliding_attention and there is no sliding_window "
                "(or use_sliding_window is off); expected its size"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
