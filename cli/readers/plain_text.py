"""The reader of plain texts: finds the encoding of bytes that are not UTF-8."""

from __future__ import annotations

import codecs
import re

import chardet

from cli.readers.reading import Reading, Textless, Unreadable, clean

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# In the head of a page, an XML file or a Python module.
_SAID = re.compile(
    rb"""charset\s*=\s*["']?([\w.:-]{2,40})|encoding\s*=\s*["']([\w.:-]{2,40})["']|coding[:=]\s*([\w.-]{2,40})"""
)
_HEAD_BYTES = 4096
_SAMPLE_BYTES = 256 * 1024
# Encodings that browsers read as a larger set of characters than the one named.
_MEANT = {
    **dict.fromkeys(("iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis"), "cp932"),
    "euc-kr": "cp949",
}


def read_plain_text(data: bytes) -> Reading:
    """Return a text and its encoding ("" for UTF-8); Unreadable if no encoding is found, Textless if empty."""
    text, encoding = decoded(data)
    text = clean(text)
    if not text.strip():
        raise Textless("empty")
    return Reading(text, encoding=encoding)


def decoded(data: bytes) -> tuple[str, str]:
    """Return bytes as text, and the name of the encoding, "" for UTF-8.

    The first of these decides: a mark of byte order, valid UTF-8, the encoding that the text names, a guess.
    """
    for mark, name in _MARKS:
        if data.startswith(mark):
            return _strictly(data, name), "" if name == "utf-8" else name
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError:
        pass
    if said := _SAID.search(data[:_HEAD_BYTES]):
        name = next(group for group in said.groups() if group).decode().lower()
        name = _MEANT.get(name, name)
        try:
            if codecs.lookup(name).name != "utf-8":
                return data.decode(name), name
        except (LookupError, UnicodeDecodeError):
            pass
    return _guessed(data)


def _guessed(data: bytes) -> tuple[str, str]:
    guess = chardet.detect(data[:_SAMPLE_BYTES]).get("encoding")
    for name in dict.fromkeys((_MEANT.get((guess or "").lower(), (guess or "").lower()), "cp1252")):
        try:
            text = data.decode(name)
        except (LookupError, UnicodeDecodeError):
            continue
        if _readable(text):
            return text, name
    raise Unreadable("not text in a known encoding")


def _strictly(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig" if name == "utf-8" else name)
    except UnicodeDecodeError as error:
        raise Unreadable(f"not {name.upper()}, which its first bytes announce") from error


def _readable(text: str) -> bool:
    """Return whether a decoded text holds almost no control characters."""
    odd = sum((c < " " and c not in "\t\n\r\f\x1b") or "\x7f" <= c < "\xa0" for c in text)
    return odd <= len(text) // 1000
