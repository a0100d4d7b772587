"""Numbers and durations of flags; an unusable one ends the command with one sentence."""

from __future__ import annotations

import math
import re

from common.errors import ConfigError

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}
_MOST_S = 86_400


def number(flag: str, text: str, *, least: float) -> float:
    """Return a flag's number; ConfigError unless it is from `least` to 1e12."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= 1e12:
        raise ConfigError(f"{flag} is {text[:100]!r}: expected a number from {least:g}")
    return value


def count(flag: str, text: str, *, least: int = 1, most: int) -> int:
    """Return a flag's whole number; ConfigError unless it is within both bounds."""
    found = int(text) if re.fullmatch(r"[0-9]{1,15}", text.strip()) else -1
    if not least <= found <= most:
        raise ConfigError(
            f"{flag} is {text[:100]!r}: expected a whole number from {least} to {most}"
        )
    return found


def seconds(flag: str, text: str, *, least: str = "1ms") -> float:
    """Return a flag's duration in seconds; ConfigError unless it is from `least` to a day."""
    value = _seconds(text)
    if not _seconds(least) <= value <= _MOST_S:
        raise ConfigError(
            f"{flag} is {text[:100]!r}: expected {least} to {_MOST_S}s, such as 1s or 500ms"
        )
    return value


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9.]{1,20})\s*(us|ms|s)?", text.strip())
    try:
        return float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        return 0.0
