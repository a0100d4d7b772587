"""Writing of frames: those of one turn of the event loop go out together, since each write wakes the reader."""

from __future__ import annotations

import asyncio


class FrameWriter:
    """Writes frames to one connection, in order; what is written after its end is dropped."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, sent: bytes, *, alone: bool = False) -> None:
        """Send a frame before the loop waits again, or at once if it is likely to go `alone`."""
        if self._held:
            self._held.append(sent)
        elif not alone:
            self._loop.call_soon(self._flush)
            self._held.append(sent)
        elif not self._transport.is_closing():
            self._transport.write(sent)

    def _flush(self) -> None:
        held, self._held = self._held, []
        if not self._transport.is_closing():
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))
