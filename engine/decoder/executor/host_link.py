"""The link between the computing device and host memory: on CUDA copies run on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.kernels.partial import Partial

Ready = Callable[[], object]


class HostLink:
    """Orders copies between a device and host memory; one thread starts all copies.

    On CUDA copies run one after another while the device computes; host memory that they write may be read after
    `wait`. On the CPU a copy is done when its call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def beside(self) -> bool:
        """True if copies run while the device computes."""
        return self._stream is not None

    @contextmanager
    def copying(self, *, after: bool, before: bool) -> Iterator[None]:
        """Start copies within this context.

        With `after` the copies wait for all work that the device was given so far; with `before` all later work waits
        for the copies. Without them work and copies run at the same time.
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
        """Return a function that waits for the copies started so far; call this only if copies run `beside`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize

    def room(self, *shape: int) -> Tensor:
        """Return host memory for fp32 numbers, pinned if copies run beside computing."""
        return torch.empty(*shape, pin_memory=self.beside)

    def wait(self) -> None:
        """Return once all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class HostRows:
    """A sub-batch's rows on their way to the host and back, layer by layer.

    `joined` holds queries, keys and values in host memory once `ready` has returned (None: at once); the host writes
    its attention to `result`. A layer's result is brought back before the next layer's rows are sent.
    """

    def __init__(self, link: HostLink, rows: int, heads: int, kv_heads: int, dim: int) -> None:
        self.result = link.room(rows, heads, dim)
        self.ready: Ready | None = None
        self._link = link
        self.joined = link.room(rows if link.beside else 0, heads + 2 * kv_heads, dim)
        self._sent = self.joined

    def send(self, joined: Tensor) -> None:
        """Start copying rows (rows, heads + 2 * kv heads, dim) to the host, as fp32."""
        # Kept until the next layer, since the copy is reading it.
        self._sent = joined.float()
        if not self._link.beside:
            self.joined = self._sent
            return
        with self._link.copying(after=True, before=False):
            self.joined.copy_(self._sent, non_blocking=True)
        self.ready = self._link.mark()

    def bring(self, out: Tensor) -> None:
        """Copy the result to `out`, (rows, heads, dim) on the device; the device's later work waits for the copy."""
        out.copy_(self.result.to(self._link.device, non_blocking=True))


class FrontRows:
    """Rows on their way to the host, which attends to the fronts of their sequences, and its partial results back.

    `found` lies in host memory; `rows.ready` and `rows.joined` are as in `HostRows`.
    """

    def __init__(self, link: HostLink, rows: int, heads: int, kv_heads: int, dim: int) -> None:
        self.rows, self._link = HostRows(link, rows, heads, kv_heads, dim), link
        self.found = Partial(self.rows.result, link.room(rows, heads), link.room(rows, heads))

    def bring(self) -> Partial:
        """Return the results on the device, whose later work waits for the copies."""
        return Partial(*(each.to(self._link.device, non_blocking=True) for each in self.found))
