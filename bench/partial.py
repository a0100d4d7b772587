"""What a long row has measured so far, kept in a file, so that the same command goes on where the last one stopped."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from bench.document import BenchOptions

T = TypeVar("T")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What a partial file holds: a row's results so far, and the digest of the code that they are of."""

    digest: str
    kept: msgspec.Raw


class PartialResults(Generic[T]):
    """A row's results so far: `kept` is what the options' partial file holds, or a fresh `kind()`.

    Of a file with results of other code only the fields `of_rivals` are taken, such as the settings that rivals are
    best with. `left` counts the pieces of work that the options' minutes left no time for. A file that holds something
    else raises msgspec.DecodeError.
    """

    def __init__(self, options: BenchOptions, kind: type[T], of_rivals: Sequence[str] = ()) -> None:
        self._path, self._digest = options.partial, options.digest
        minutes = math.inf if options.minutes is None else options.minutes
        self._end_s = time.monotonic() + 60 * minutes
        self.left = 0
        self.kept = kind()
        if self._path is not None and self._path.exists():
            try:
                file = msgspec.msgpack.decode(self._path.read_bytes(), type=_File)
            except msgspec.DecodeError as error:
                raise msgspec.DecodeError(
                    f"{self._path}: no partial result of this version ({error}); delete the file to begin anew"
                ) from error
            if file.digest == self._digest:
                self.kept = msgspec.msgpack.decode(file.kept, type=kind)
                return
            print(f"{self._path}: of other code than the present; begins anew", file=sys.stderr)
            found = msgspec.msgpack.decode(file.kept)  # other code may have kept other fields
            self.kept = msgspec.convert({name: found[name] for name in of_rivals}, kind)

    def begins(self, pieces: int = 1) -> bool:
        """Return whether there is time to begin a piece of work; if not, it and those begun with it are left."""
        late = time.monotonic() > self._end_s
        self.left += pieces * late
        return not late

    def save(self) -> None:
        """Write down what is kept, if the options name a file; a kill leaves the file as it was, or whole."""
        if self._path is not None:
            fresh = self._path.with_suffix(".new")
            kept = msgspec.Raw(msgspec.msgpack.encode(self.kept))
            fresh.write_bytes(msgspec.msgpack.encode(_File(self._digest, kept)))
            fresh.replace(self._path)
