"""Readings of documents, the errors of unreadable ones, and the bounds that all readers keep."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

MAX_TEXT_CHARACTERS = 32_000_000
MAX_PAGES = 5000
_LIGATURES = {
    0xFB00 + n: text for n, text in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))
}
# Invisible characters: control characters, halves of surrogate pairs, soft hyphens, marks of byte order.
_UNREAD = re.compile("[\x00-\x08\x0b-\x1f\x7f\xad\ufeff\ufffe\uffff\ud800-\udfff]")
_TITLE_CHARACTERS = 200
SENTENCE_ENDS = frozenset(
    ".!?:;。\uff01\uff1f\uff1a\uff1b"
)  # and the wide ones of Chinese and Japanese


class Unreadable(Exception):
    """A document cannot be read; the message gives the reason, in words that follow the file's name."""


class Textless(Unreadable):
    """A document was read and holds no text, as a scan or a page of pictures."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A document's text.

    `pages` holds the character at which each page (or slide) starts, rising from 0; it is empty for formats without
    pages. `encoding` is a guessed encoding of the file, else "", and `note` a remark for the user.
    """

    text: str
    title: str = ""
    pages: list[int] = field(default_factory=list)
    encoding: str = ""
    note: str = ""


def clean(text: str) -> str:
    """Return a text in plain form: composed letters, ligatures as letters, lines ended by one character."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n")
    return _UNREAD.sub("", unicodedata.normalize("NFC", text.translate(_LIGATURES)))


def title_in(text: str) -> str:
    """Return a title on one line, at most 200 characters of it."""
    return " ".join(clean(text).split())[:_TITLE_CHARACTERS]


def joined(pages: list[str], title: str = "", note: str = "") -> Reading:
    """Return pages as one text: a blank line between two, or a space where a sentence goes on."""
    text, starts = "", []
    parts: list[str] = []
    length = 0
    for page in pages:
        gap = "" if not length else " " if _goes_on(text, page) else "\n\n"
        starts.append(length + len(gap) if page else length)
        if page:
            parts += [gap, page]
            length += len(gap) + len(page)
            text = page
        if length > MAX_TEXT_CHARACTERS:
            raise Unreadable(f"more than {MAX_TEXT_CHARACTERS:,} characters of text")
    return Reading("".join(parts), title, starts, note=note)


def _goes_on(before: str, after: str) -> bool:
    return before[-1:] not in SENTENCE_ENDS and after[:1].islower()
