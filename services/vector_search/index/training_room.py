"""The memory that the training of lists takes while it lasts, and the sample that there is memory for.

The process that trains shares its memory limit with the one that asked for it, so it is told how much it may read.
"""

from __future__ import annotations

# What the process takes whatever it trains, the pages of code that both run among it; how often it holds a square
# matrix of the dimensions; how often a sample is held, once by who asked. Measured, of its own: 62 MB without a
# sample; 82, 121 and 135 with 4, 16 and 20 MB of 128 dimensions; 169 with 16 MB of 1,024.
_PROCESS_BYTES = 112 << 20
_SQUARES, _TIMES_HELD = 10, 5
# Rows of a sample by which lists are worth training.
LEAST_ROWS = 8192


def training_bytes(rows: int, dimension: int) -> int:
    """Return about how many bytes a training by a sample of so many rows takes, beside what there is already."""
    return _fixed(dimension) + _TIMES_HELD * 4 * rows * dimension


def sample_rows(wanted: int, dimension: int, room: int | None) -> int:
    """Return how many of the wanted rows a training has room for; 0 if those would be too few. None: room enough."""
    if room is None:
        return wanted
    fitting = max(room - _fixed(dimension), 0) // (_TIMES_HELD * 4 * dimension)
    return min(wanted, fitting) if fitting >= min(wanted, LEAST_ROWS) else 0


def _fixed(dimension: int) -> int:
    return _PROCESS_BYTES + _SQUARES * 4 * dimension**2
