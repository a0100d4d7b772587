"""Aliases: other names under which clients may ask for models."""

from __future__ import annotations

from common.errors import ConfigError


def parse_aliases(text: str) -> dict[str, str]:
    """Return the models by their aliases, from the setting's text; ConfigError for anything but alias=model pairs."""
    found: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        alias, equals, model = map(str.strip, pair.partition("="))
        if not (equals and alias and model) or len(alias) > 200:
            raise ConfigError(
                f"SPILLWAY_MODEL_ALIASES has {pair[:80]!r}: expected alias=model, several with commas"
            )
        if found.setdefault(alias, model) != model:
            raise ConfigError(
                f"SPILLWAY_MODEL_ALIASES names {alias[:80]!r} twice: expected one model for it"
            )
    return found
