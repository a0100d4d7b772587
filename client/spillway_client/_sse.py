"""Server-sent events from bytes that arrive in any pieces."""

from __future__ import annotations

from typing import NamedTuple


class Frame(NamedTuple):
    """One event: its data (lines joined), its name, and its own id, None without one."""

    data: str
    event: str
    id: str | None


class Parser:
    """Cuts a byte stream into frames; an event that a broken connection left unfinished is never a frame.

    Lines end with LF or CRLF.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._event = ""
        self._id: str | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes and return the frames that they complete."""
        *ended, rest = data.split(b"\n")
        frames = []
        for part in ended:
            self._line += part
            frame = self._take(bytes(self._line).removesuffix(b"\r").decode("utf-8", "replace"))
            self._line.clear()
            if frame is not None:
                frames.append(frame)
        self._line += rest
        return frames

    def _take(self, line: str) -> Frame | None:
        if not line:
            return self._end()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None  # a comment, or a field that is not used here

    def _end(self) -> Frame | None:
        data, event, own = self._data, self._event, self._id
        self._data, self._event, self._id = [], "", None
        return Frame("\n".join(data), event or "message", own) if data else None
