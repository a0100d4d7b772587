"""The metadata of one architecture in a GGUF file, each entry read with its type and range checked."""

from __future__ import annotations

import math
from typing import Any

from common.errors import ConfigError
from engine.models.gguf.reader import GgufFile


class ArchitectureKeys:
    """Metadata entries, named without the architecture's prefix; ConfigError names a missing or invalid entry."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self._architecture = file, architecture

    def has(self, name: str) -> bool:
        """True if the file has the entry."""
        return f"{self._architecture}.{name}" in self.file.metadata

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number that is not negative."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.wrong(name, "a number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Return text."""
        return self.file.text(f"{self._architecture}.{name}", default)

    def wrong(self, name: str, expected: str) -> ConfigError:
        """Return the error of an entry."""
        value = self._value(name, None)
        shown = "missing" if value is None else f"{value!r:.40}"
        return ConfigError(
            f"{self.file.path}: {self._architecture}.{name} is {shown}; expected {expected}"
        )

    def _value(self, name: str, default: Any) -> Any:
        return self.file.metadata.get(f"{self._architecture}.{name}", default)
