"""The store of passages that were computed alone: bounded in bytes, the longest unused passage is dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PassageStore(Generic[T]):
    """Values by key, `most_bytes` at most in all, by `size_of`; 0 keeps none. Any thread may call it.

    `hits` and `misses` count look-ups, `evicted` the values dropped for others; `bytes` are the bytes held now.
    """

    def __init__(self, most_bytes: int, size_of: Callable[[T], int]) -> None:
        self.most_bytes = most_bytes
        self.hits = self.misses = self.evicted = self.bytes = 0
        self._size_of = size_of
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of values held."""
        return len(self._values)

    def get(self, key: bytes) -> T | None:
        """Return the value of a key, which is then the latest used; None if there is none."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._values.move_to_end(key)
            return found

    def put(self, key: bytes, value: T) -> None:
        """Keep a value as the latest used; one that is larger than the store's bytes is not kept."""
        size = self._size_of(value)
        with self._lock:
            if key in self._values:
                self.bytes -= self._size_of(self._values.pop(key))
            if size > self.most_bytes:
                return
            while self.bytes + size > self.most_bytes:
                _, dropped = self._values.popitem(last=False)
                self.bytes -= self._size_of(dropped)
                self.evicted += 1
            self._values[key] = value
            self.bytes += size

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self.bytes = 0
