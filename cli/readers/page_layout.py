"""Page layout: the lines of one page in reading order, joined into paragraphs.

Pure functions of pieces of text and their boxes. Lengths are in the page's units, y grows upwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from cli.readers.reading import SENTENCE_ENDS

HYPHEN = "\ufffe"  # at the end of a piece: a word is cut here
_BINS = 200
_FEWEST_LINES = 5  # lines of a column
_PROSE_CHARACTERS = 16  # a typical line of a column has at least these; cells of tables have fewer
_ITEM = re.compile(r"[•‣◦▪●○\u2013—*·-]\s|\(?[0-9a-zA-Z]{1,3}[.)]\s")


@dataclass(frozen=True, slots=True)
class TextBox:
    """Text on one line without a gap, and its box."""

    text: str
    left: float
    bottom: float
    right: float
    top: float

    @property
    def height(self) -> float:
        """The box's height."""
        return self.top - self.bottom


@dataclass(frozen=True, slots=True)
class TextLine:
    """Pieces on one line, from left to right: one in running text, several in a table's row."""

    pieces: tuple[TextBox, ...]

    @property
    def text(self) -> str:
        """The pieces, two spaces between them."""
        return "  ".join(piece.text for piece in self.pieces)

    @property
    def box(self) -> TextBox:
        """The box around all pieces."""
        of = self.pieces
        return TextBox(
            "",
            min(p.left for p in of),
            min(p.bottom for p in of),
            max(p.right for p in of),
            max(p.top for p in of),
        )


def page_lines(pieces: Sequence[TextBox]) -> list[TextLine]:
    """Return a page's lines in reading order; `pieces` are in the order of the file.

    That order is kept in all cases but two: columns that a program wrote line by line across the page are read one
    after the other, and lines from the bottom up are reversed.
    """
    ordered = [piece for group in _columns(pieces) for piece in _downwards(group)]
    lines: list[list[TextBox]] = []
    for piece in ordered:
        if lines and _beside(lines[-1][-1], piece):
            lines[-1].append(piece)
        else:
            lines.append([piece])
    return [TextLine(tuple(line)) for line in lines]


def _beside(left: TextBox, right: TextBox) -> bool:
    common = min(left.top, right.top) - max(left.bottom, right.bottom)
    return right.left >= left.right and common > 0.5 * min(left.height, right.height)


def _downwards(pieces: list[TextBox]) -> list[TextBox]:
    steps = [after.bottom - before.bottom for before, after in pairwise(pieces)]
    up = sum(step > 0 for step in steps)
    return pieces[::-1] if len(steps) >= 2 and up > 0.8 * len(steps) else pieces


def _columns(pieces: Sequence[TextBox]) -> list[list[TextBox]]:
    """Return the groups of pieces to read one after the other: one group, or one for each interleaved column."""
    at = _gutter(pieces)
    if at is None:
        return [list(pieces)]
    sides = [_side(piece, at) for piece in pieces]
    left = [piece for piece, side in zip(pieces, sides, strict=True) if side < 0]
    right = [piece for piece, side in zip(pieces, sides, strict=True) if side > 0]
    across = [piece for piece, side in zip(pieces, sides, strict=True) if side == 0]
    if min(len(left), len(right)) < _FEWEST_LINES or len(across) > 0.25 * len(pieces):
        return [list(pieces)]
    prose = all(median(len(p.text) for p in some) >= _PROSE_CHARACTERS for some in (left, right))
    turns = sum(a != b for a, b in pairwise(side for side in sides if side))
    if not prose or turns < 0.5 * min(len(left), len(right)):
        return [list(pieces)]
    groups: list[list[TextBox]] = []
    for head in [*sorted(across, key=lambda piece: -piece.top), None]:
        floor = head.top if head else float("-inf")
        for some in (left, right):
            groups.append([piece for piece in some if piece.bottom >= floor])
            some[:] = [piece for piece in some if piece.bottom < floor]
        if head:
            groups.append([head])
    return [group for group in groups if group]


def _side(piece: TextBox, at: float) -> int:
    return -1 if piece.right <= at else 1 if piece.left >= at else 0


def _gutter(pieces: Sequence[TextBox]) -> float | None:
    """Return the middle of the widest vertical strip, near the page's middle, that almost no text crosses."""
    if len(pieces) < 2 * _FEWEST_LINES:
        return None
    low, high = min(p.left for p in pieces), max(p.right for p in pieces)
    if not high > low:
        return None
    cover = [0] * _BINS
    for piece in pieces:
        first = int((piece.left - low) / (high - low) * _BINS)
        last = int((piece.right - low) / (high - low) * _BINS)
        for place in range(max(first, 0), min(last + 1, _BINS)):
            cover[place] += 1
    most = 0.1 * max(cover)
    runs: list[tuple[int, int]] = []
    begin = None
    for place in range(_BINS // 4, 3 * _BINS // 4 + 1):
        free = place < 3 * _BINS // 4 and cover[place] <= most
        if free and begin is None:
            begin = place
        elif not free and begin is not None:
            runs.append((place - begin, begin))
            begin = None
    if not runs:
        return None
    width, begin = max(runs)
    return low + (begin + width / 2) / _BINS * (high - low)


# -- paragraphs ------------------------------------------------------------------------------------------


def paragraphs(lines: Sequence[TextLine]) -> str:
    """Return lines as a text: lines of a paragraph are joined, others stay, and gaps become blank lines."""
    boxes = [line.box for line in lines]
    edges = [_right_edge(boxes, place) for place in range(len(boxes))]
    parts: list[str] = []
    for place, line in enumerate(lines):
        if place:
            before = lines[place - 1]
            gap = _gap(before, line, boxes[place - 1], boxes[place], edges[place - 1])
            cut = parts[-1].endswith(HYPHEN)
            if cut:
                parts[-1] = parts[-1][:-1] + ("" if gap == " " else "-")
            parts.append("" if cut and gap == " " else gap)
        parts.append(line.text)
    return "".join(parts).replace(HYPHEN, "-")


def _right_edge(boxes: Sequence[TextBox], place: int) -> float:
    """Return the right edge of a line's block: the farthest one of up to three lines above and three below."""
    edge = boxes[place].right
    for step in (-1, 1):
        at = place
        while 0 <= at + step < len(boxes) and abs(at - place) < 3:
            upper, lower = (
                (boxes[at + step], boxes[at]) if step < 0 else (boxes[at], boxes[at + step])
            )
            if _moved(upper, lower):
                break
            at += step
            edge = max(edge, boxes[at].right)
    return edge


def _moved(above: TextBox, below: TextBox) -> bool:
    """Return whether there is a gap between two lines, or the second one is in the next column."""
    height, distance = max(above.height, below.height), above.bottom - below.top
    return distance > 0.9 * height or distance < -0.6 * height


def _gap(before: TextLine, line: TextLine, above: TextBox, below: TextBox, edge: float) -> str:
    """Return the separator of two lines: "" or a space within a paragraph, one line end, or two."""
    text, following = before.text, line.text
    height = max(above.height, below.height)
    if text.endswith(HYPHEN):
        return " "
    if _moved(above, below):
        goes_on = (
            text[-1] not in SENTENCE_ENDS and following[0].islower() and above.bottom < below.top
        )
        return " " if goes_on else "\n\n"
    if len(before.pieces) + len(line.pieces) > 2 or _ITEM.match(following):
        return "\n"
    if height > 1.25 * min(above.height, below.height):
        return "\n\n"
    word = following.split(maxsplit=1)[0]
    glyph = (below.right - below.left) / max(len(following), 1)
    wide = _wide(following[0])
    room = edge - above.right
    full = room < (glyph * (1.5 if wide else len(word)) + 0.3 * height)
    if not full and text[-1] not in SENTENCE_ENDS:  # a short line within a sentence
        full = room < 0.25 * (edge - above.left)
    indented = not -6 * height < below.left - above.left < 1.2 * height
    if not full or indented:
        return "\n"
    return "" if wide and _wide(text[-1]) else " "


def _wide(character: str) -> bool:
    """Return whether a character is of a script written without spaces between words: Chinese, Japanese."""
    return (
        "\u2e80" <= character <= "\ua4cf"
        or "\uf900" <= character <= "\ufaff"
        or ("\uff00" <= character <= "\uffef" or "\U00020000" <= character <= "\U0003ffff")
    )


# -- headers and footers ---------------------------------------------------------------------------------


def without_running_lines(pages: Sequence[Sequence[TextLine]]) -> list[list[TextLine]]:
    """Return pages without headers and footers: separate first or last lines that most pages share, numbers aside."""
    kept = [list(page) for page in pages]
    if len(kept) < 3:
        return kept
    for end in (0, -1):
        counts: dict[str, int] = {}
        apart = [len(page) > 1 and _apart(page, end) for page in kept]
        for page, alone in zip(kept, apart, strict=True):
            if alone:
                counts[_numberless(page[end])] = counts.get(_numberless(page[end]), 0) + 1
        running = {text for text, count in counts.items() if count > max(2, 0.6 * len(kept))}
        for page, alone in zip(kept, apart, strict=True):
            if alone and _numberless(page[end]) in running:
                del page[end]
    return kept


def _apart(page: Sequence[TextLine], end: int) -> bool:
    """Return whether a page's first (0) or last (-1) line is more than a line's height away from its neighbour."""
    above, below = (page[0].box, page[1].box) if end == 0 else (page[-2].box, page[-1].box)
    return above.bottom - below.top > max(above.height, below.height)


def _numberless(line: TextLine) -> str:
    return re.sub(r"[0-9]+", "#", line.text)


def texts_of(pages: Iterable[Sequence[TextLine]]) -> list[str]:
    """Return each page's text; see `paragraphs`."""
    return [paragraphs(page) for page in pages]
