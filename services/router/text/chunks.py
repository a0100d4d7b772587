"""Chunks of a document: split by headings, then by tokens with overlap, each with its place in the text.

The functions are pure: they get a text and the character offsets of its tokens, so cuts always fall between tokens, and
a piece's token ids are a slice of the document's.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

_FENCE = re.compile(r"^[ ]{0,3}(```|~~~)")
_HASHES = re.compile(r"^[ ]{0,3}#{1,6}[ \t]+\S")
_UNDERLINE = re.compile(r"^([=\-~^\"'`:.*+#])\1{2,}[ \t]*$")


class TextPiece(NamedTuple):
    """Characters [start, end) of a text and its tokens [first, last)."""

    start: int
    end: int
    first: int
    last: int


def sections(text: str) -> list[int]:
    """Return the character offsets at which sections start, 0 first (markdown and reStructuredText headings)."""
    starts, position, fence = [0], 0, ""
    previous, previous_at = "", 0
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\r\n")
        mark = _FENCE.match(bare)
        if mark and (not fence or fence == mark[1]):
            fence = "" if fence else mark[1]
        elif not fence:
            if _HASHES.match(bare):
                starts.append(position)
            elif (
                _UNDERLINE.match(bare)
                and previous.strip()
                and len(bare.rstrip()) >= len(previous.rstrip())
            ):
                starts.append(previous_at)
        previous, previous_at = bare, position
        position += len(line)
    return sorted(set(starts))


def _boundary(text: str, left: int, right: int) -> int:
    """Return the quality of a cut from character `left` to `right`: paragraph 4, line 3, sentence 2, word 1, none 0."""
    gap = text[left:right]
    if gap.count("\n") > 1:
        return 4
    if "\n" in gap:
        return 3
    if gap:
        return 2 if text[left - 1 : left] in ".!?;:" else 1
    return 0


def _cut(text: str, offsets: Sequence[tuple[int, int]], first: int, limit: int, last: int) -> int:
    """Return the token at which the piece from `first` ends: after at most `limit` tokens, at the best boundary."""
    if last - first <= limit:
        return last
    end = first + limit
    earliest = max(first + 1, end - max(1, limit // 4))
    best, cut = -1, end
    for candidate in range(end, earliest - 1, -1):
        quality = _boundary(text, offsets[candidate - 1][1], offsets[candidate][0])
        if quality > best:
            best, cut = quality, candidate
            if quality == 4:
                break
    return cut


def _overlapped(offsets: Sequence[tuple[int, int]], first: int, cut: int, overlap: int) -> int:
    """Return where the next piece starts: up to `overlap` tokens before `cut`, at a word's start, past `first`."""
    lowest = max(first + 1, cut - overlap)
    for candidate in range(lowest, cut):
        if offsets[candidate - 1][1] < offsets[candidate][0]:
            return candidate
    return cut


def _merged(bounds: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Join each section too small to stand alone (a bare heading) with the next, if both fit one piece."""
    merged: list[tuple[int, int]] = []
    for first, last in bounds:
        if merged:
            before = merged[-1]
            if before[1] - before[0] <= limit // 8 and last - before[0] <= limit:
                merged[-1] = (before[0], last)
                continue
        merged.append((first, last))
    return merged


def split(
    text: str, offsets: Sequence[tuple[int, int]], max_tokens: int, overlap_tokens: int = 0
) -> list[TextPiece]:
    """Split `text`, whose i-th token covers characters offsets[i], into pieces of at most `max_tokens` tokens.

    Pieces are in order, their character ranges cover the text, neighbours of one section overlap by at most
    `overlap_tokens` tokens; a text without tokens is one piece. ValueError if `max_tokens` < 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: expected at least 1")
    count = len(offsets)
    if count == 0:
        return [TextPiece(0, len(text), 0, 0)]
    overlap = min(overlap_tokens, max_tokens // 2)
    begins = [start for start, _ in offsets]
    firsts = sorted({bisect_left(begins, start) for start in sections(text)} | {0})
    firsts = [first for first in firsts if first < count]
    bounds = list(zip(firsts, [*firsts[1:], count], strict=True))
    pieces: list[TextPiece] = []
    for section_first, section_last in _merged(bounds, max_tokens):
        first = section_first
        while True:
            cut = _cut(text, offsets, first, max_tokens, section_last)
            start = offsets[first][0] if first else 0
            end = len(text) if cut == count else max(offsets[cut][0], offsets[cut - 1][1])
            pieces.append(TextPiece(start, end, first, cut))
            if cut == section_last:
                break
            first = _overlapped(offsets, first, cut, overlap)
    return pieces
