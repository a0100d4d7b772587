"""Rows of a large shard in a file without a name: the system keeps in memory what is read, and takes it back if short.

The file is no store: it is filled when a shard opens, and gone with the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np


class RowsFile:
    """A file that grows and is mapped anew; earlier mappings go on showing the same rows."""

    def __init__(self, directory: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - lives as long as this does
        weakref.finalize(self, self._file.close)

    def mapped(self, rows: int, dimension: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return room for so many rows, what was written before among them; OSError if the disk lacks it."""
        size = rows * dimension * 4
        # Taken now: a write to a mapping that finds the disk full would end the process.
        os.posix_fallocate(self._file.fileno(), 0, size)
        mapping = mmap.mmap(self._file.fileno(), size)
        mapping.madvise(mmap.MADV_RANDOM)  # a search reads a few rows here and there
        return np.frombuffer(mapping, np.float32).reshape(rows, dimension)
