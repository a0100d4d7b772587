"""Page arrival: counts the layers whose pages were copied to the device while a step computes the layers before."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

Publish = Callable[[ctypes.c_int64, int], None]


def _store(flag: ctypes.c_int64, layers: int) -> None:
    flag.value = layers


class PageArrival:
    """The count of layers whose pages have arrived; the copying thread calls `ready`, the computing thread waits."""

    def __init__(self, layers: int, publish: Publish = _store) -> None:
        """`publish` stores the count at `flag` for compiled kernels, and never lets them see it before the pages."""
        self.layers = layers
        self.flag = ctypes.c_int64(0)
        self._publish = publish
        self._changed = threading.Condition()
        self._waits: dict[int, Callable[[], None]] = {}

    def ready(self, layers: int, then: Callable[[], None] | None = None) -> None:
        """Record that the first `layers` layers' pages have arrived; `then` makes the device wait for the last one."""
        with self._changed:
            if then is not None:
                self._waits[layers - 1] = then
            self._publish(self.flag, layers)
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return once a layer's pages have arrived, or the device has been told to wait for them."""
        with self._changed:
            self._changed.wait_for(lambda: self.flag.value > layer)
            then = self._waits.get(layer)
        if then is not None:
            then()

    def wait_all(self) -> None:
        """Return once the pages of all layers were copied, or their copies were queued on the device."""
        self.wait(self.layers - 1)
