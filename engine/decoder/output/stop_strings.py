"""Stop strings in growing text: text that may begin a stop string is held back, so that no part of one is delivered."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Watches one choice's text: `push` takes text and returns the text that is certain not to be in a stop string."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = [text for text in strings if text]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certain now, and the stop string that ended the text, if any.

        Of several stop strings the first to begin counts; of several with the same beginning, the first in the list.
        """
        text = self._held + text
        found = [(at, order) for order, at in enumerate(map(text.find, self._strings)) if at >= 0]
        if found:
            at, order = min(found)
            self._held = ""
            return text[:at], self._strings[order]
        keep = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the held-back text: the output has ended, so that the text is not part of a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
