"""What a long row has measured so far, kept in a file, so that the same command goes on where the last one stopped."""

from __future__ import annotations

import math
import time
from typing import Generic, TypeVar

import msgspec

from bench.document import BenchOptions

T = TypeVar("T")


class PartialResults(Generic[T]):
    """A row's results so far: `kept` is what the options' partial file holds, or a fresh `kind()`.

    `left` counts the pieces of work that the options' minutes left no time for. A file that holds something else
    raises msgspec.DecodeError.
    """

    def __init__(self, options: BenchOptions, kind: type[T]) -> None:
        self._path = options.partial
        minutes = math.inf if options.minutes is None else options.minutes
        self._end_s = time.monotonic() + 60 * minutes
        self.left = 0
        self.kept = kind()
        if self._path is not None and self._path.exists():
            self.kept = msgspec.msgpack.decode(self._path.read_bytes(), type=kind)

    def begins(self, pieces: int = 1) -> bool:
        """Return whether there is time to begin a piece of work; if not, it and those begun with it are left."""
        late = time.monotonic() > self._end_s
        self.left += pieces * late
        return not late

    def save(self) -> None:
        """Write down what is kept, if the options name a file; a kill leaves the file as it was, or whole."""
        if self._path is not None:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(msgspec.msgpack.encode(self.kept))
            fresh.replace(self._path)
