"""Text for a terminal: without control characters, and with dim lines if the terminal has colours."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def printable(text: str, *, lines: bool = False) -> str:
    """Replace control characters by spaces, so that a document or a model cannot control the terminal.

    With `lines`, line ends and tabs stay.
    """
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else " " for c in text)


def write(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def dim(text: str, stream: TextIO | None = None) -> str:
    """Return text dimmed if `stream` (by default stdout) is a terminal that wants colours."""
    shown_on = stream or sys.stdout
    plain = (
        not shown_on.isatty()
        or "NO_COLOR" in os.environ
        or os.environ.get("TERM") in {None, "dumb"}
    )
    return text if plain else f"\033[2m{text}\033[0m"
