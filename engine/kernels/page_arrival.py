"""How far the pages that a step reads have come: they are copied layer by layer while the step computes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

Publish = Callable[[ctypes.c_int64, int], None]


def _store(flag: ctypes.c_int64, layers: int) -> None:
    flag.value = layers


class PageArrival:
    """Counts layers of the model, from the first; whoever copies says `come`, whoever computes waits."""

    def __init__(self, layers: int, publish: Publish = _store) -> None:
        """`publish` stores the count so that compiled kernels, which read it at `flag`, see the pages first."""
        self.layers = layers
        self.flag = ctypes.c_int64(0)
        self._publish = publish
        self._changed = threading.Condition()
        self._waits: dict[int, Callable[[], None]] = {}

    def come(self, layers: int, then: Callable[[], None] | None = None) -> None:
        """The pages of the first `layers` layers have come, the last of them once the device has done `then`."""
        with self._changed:
            if then is not None:
                self._waits[layers - 1] = then
            self._publish(self.flag, layers)
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return once the pages of a layer are there, or the device has been told to wait for them."""
        with self._changed:
            self._changed.wait_for(lambda: self.flag.value > layer)
            then = self._waits.get(layer)
        if then is not None:
            then()

    def wait_all(self) -> None:
        """Return once the pages of all layers are there, as far as whoever copies is concerned."""
        self.wait(self.layers - 1)
