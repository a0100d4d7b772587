"""Writing of frames: frames of one turn of the event loop are sent together, since each write wakes the reader."""

from __future__ import annotations

import asyncio


class FrameWriter:
    """Writes frames to one connection, in order; frames after its end are dropped."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, sent: bytes, *, alone: bool = False) -> None:
        """Send a frame at once if it is `alone` and no frame waits, else in the loop's next turn."""
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
