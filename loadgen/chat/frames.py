"""Server-sent events, read from bytes as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Frame(NamedTuple):
    """One event of a stream; `id` and `event` are empty if the server gave none."""

    data: bytes
    id: str = ""
    event: str = ""


class Frames:
    """Cuts a byte stream, in parts of any size, into frames; comments are counted, not returned."""

    def __init__(self) -> None:
        self._rest = b""
        self.pings = 0

    def feed(self, part: bytes) -> Iterator[Frame]:
        """Yield the frames that `part` completes."""
        *whole, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for text in whole:
            frame = self._frame(text)
            if frame is not None:
                yield frame

    def _frame(self, text: bytes) -> Frame | None:
        data: list[bytes] = []
        ident = event = ""
        for line in text.split(b"\n"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                data.append(value)
            elif name == b"id":
                ident = value.decode("utf-8", "replace")
            elif name == b"event":
                event = value.decode("utf-8", "replace")
            elif not name and line:
                self.pings += 1
        return Frame(b"\n".join(data), ident, event) if data else None
