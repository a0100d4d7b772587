"""Text for a terminal: control characters are removed, and dim lines are used where the terminal has them."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def printable(text: str, *, lines: bool = False) -> str:
    """Replace control characters by spaces: a document or a model must not drive the terminal.

    With `lines`, line ends and tabs stay.
    """
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else " " for c in text)


def write(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def dim(text: str, stream: TextIO | None = None) -> str:
    """Return text dimmed, where `stream` (stdout) is a terminal that wants colours."""
    shown_on = stream or sys.stdout
    plain = (
        not shown_on.isatty()
        or "NO_COLOR" in os.environ
        or os.environ.get("TERM") in {None, "dumb"}
    )
    return text if plain else f"\033[2m{text}\033[0m"
