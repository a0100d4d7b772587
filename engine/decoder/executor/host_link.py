"""The link between the device that computes and host memory: on CUDA copies run on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Ready = Callable[[], object]


class HostLink:
    """Orders copies between a device and host memory; one thread begins them.

    On CUDA they run one after another beside what the device computes, and what they write to the host is there after
    `wait`. On the CPU they are done when they return.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def beside(self) -> bool:
        """Whether copies run beside what the device computes."""
        return self._stream is not None

    @contextmanager
    def copying(self, *, after: bool, before: bool) -> Iterator[None]:
        """Begin copies within.

        They come `after` all that the device was given to compute so far, and `before` all that it is given later; what
        is neither computes beside them.
        """
        if self._stream is None:
            yield
            return
        computing = torch.cuda.current_stream(self.device)
        if after:
            self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        if before:
            computing.wait_stream(self._stream)

    def mark(self) -> Ready:
        """Return what returns once the copies begun so far are done; only where they run `beside`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize

    def room(self, *shape: int) -> Tensor:
        """Return host memory for fp32 numbers that copies beside computing can read and write."""
        return torch.empty(*shape, pin_memory=self.beside)

    def wait(self) -> None:
        """Return once all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class HostRows:
    """The way to the host and back of a sub-batch's rows, layer by layer.

    `joined` are queries, keys and values in host memory once `ready` has returned (None: now), and `result` is where
    the host writes what it attended. A layer's result was brought back before the next layer's rows are sent.
    """

    def __init__(self, link: HostLink, rows: int, heads: int, kv_heads: int, dim: int) -> None:
        self.result = link.room(rows, heads, dim)
        self.ready: Ready | None = None
        self._link = link
        self.joined = link.room(rows if link.beside else 0, heads + 2 * kv_heads, dim)
        self._sent = self.joined

    def send(self, joined: Tensor) -> None:
        """Begin to copy rows (rows, heads + 2 * kv heads, dim) to the host, as fp32."""
        # Kept until the next layer's: it is being read.
        self._sent = joined.float()
        if not self._link.beside:
            self.joined = self._sent
            return
        with self._link.copying(after=True, before=False):
            self.joined.copy_(self._sent, non_blocking=True)
        self.ready = self._link.mark()

    def bring(self, out: Tensor) -> None:
        """Write the result to `out`, (rows, heads, dim) on the device, before what it computes from now on."""
        out.copy_(self.result.to(self._link.device, non_blocking=True))
