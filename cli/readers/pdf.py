"""The reader of PDFs, by PDFium."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import BinaryIO

import pypdfium2
from pypdfium2 import raw

from cli.readers.page_layout import (
    HYPHEN,
    TextBox,
    TextLine,
    page_lines,
    texts_of,
    without_running_lines,
)
from cli.readers.reading import (
    MAX_PAGES,
    MAX_TEXT_CHARACTERS,
    Reading,
    Textless,
    Unreadable,
    clean,
    joined,
    title_in,
)

_GAP = 1.6  # heights of a line: a wider gap separates two pieces of text
_SAMPLE = 64
_CUTS = "\ufffe\x02"  # PDFium's marks of a word cut at the end of a line
_NOTED_PAGES = 10
_NO_TITLES = ("untitled", "(anonymous)", "microsoft word - ", "microsoft powerpoint - ")


def read_pdf(file: BinaryIO) -> Reading:
    """Return a PDF's text and the starts of its pages; Unreadable or Textless otherwise."""
    try:
        document = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("encrypted: it takes a password to read it") from error
        raise Unreadable("a damaged PDF") from error
    count = len(document)
    if count > MAX_PAGES:
        raise Unreadable(f"{count:,} pages; at most {MAX_PAGES:,} are read")
    pages, pictures, damaged = _pages(document, count)
    if not any(pages):
        if pictures:
            raise Textless(
                f"a scan: {_pages_are(count)} without text; recognise its text (OCR) first"
            )
        raise Textless(f"{_pages_are(count)} without text")
    texts = [clean(text).strip() for text in texts_of(without_running_lines(pages))]
    note = "; ".join(
        f"no text on {_numbered(some)}{why}"
        for some, why in ((pictures, ": only pictures"), (damaged, ": damaged"))
        if some
    )
    return joined(texts, _title(document), note)


def _pages(
    document: pypdfium2.PdfDocument, count: int
) -> tuple[list[list[TextLine]], list[int], list[int]]:
    """Return each page's lines, and the numbers of pages with only pictures and of damaged pages."""
    pages: list[list[TextLine]] = []
    pictures: list[int] = []
    damaged: list[int] = []
    characters = 0
    for number in range(count):
        try:
            page = document[number]
            text = page.get_textpage()
        except pypdfium2.PdfiumError:
            pages.append([])
            damaged.append(number + 1)
            continue
        lines = page_lines(list(_pieces(text)))
        if not lines and next(page.get_objects([raw.FPDF_PAGEOBJ_IMAGE], max_depth=3), None):
            pictures.append(number + 1)
        pages.append(lines)
        characters += sum(len(line.text) for line in lines)
        if characters > MAX_TEXT_CHARACTERS:
            raise Unreadable(f"more than {MAX_TEXT_CHARACTERS:,} characters of text")
        text.close()
        page.close()
    return pages, pictures, damaged


def _pieces(text: pypdfium2.PdfTextPage) -> Iterator[TextBox]:
    """Yield a page's text in PDFium's order, cut at line ends and at wide gaps; boxes as if all text were upright."""
    count = text.count_chars()
    turn = most = _most_turned(text, count)
    box = raw.FS_RECTF()
    held: list[str] = []
    left = bottom = right = top = 0.0

    def piece() -> Iterator[TextBox]:
        told = "".join(held).strip()
        held.clear()
        if told and top > bottom:
            yield TextBox(told, left, bottom, right, top)

    for index in range(count):
        code = raw.FPDFText_GetUnicode(text, index)
        character = chr(code) if code < 0x110000 else ""
        if character in "\r\n":
            yield from piece()
            continue
        if character.isspace() or raw.FPDFText_IsGenerated(text, index) == 1:
            held += [" "] if held else []
            continue
        cut = character in _CUTS
        before, turn = turn, _quarters(text, index)
        if held and turn != before:
            yield from piece()
        if not raw.FPDFText_GetLooseCharBox(text, index, ctypes.byref(box)):
            continue
        x0, y0, x1, y1 = _turned(most, box.left, box.bottom, box.right, box.top)
        if (
            held
            and turn == most
            and (x0 - right > _GAP * (top - bottom) or y1 < bottom or y0 > top)
        ):
            yield from piece()
        if not held:
            left, bottom, right, top = x0, y0, x1, y1
        else:
            left, bottom = min(left, x0), min(bottom, y0)
            right, top = max(right, x1), max(top, y1)
        held.append(HYPHEN if cut else character)
        if cut:
            yield from piece()
    yield from piece()


def _quarters(text: pypdfium2.PdfTextPage, index: int) -> int:
    """Return the number of quarter turns, clockwise, by which a character is turned."""
    angle: float = raw.FPDFText_GetCharAngle(text, index)
    return round(angle / (math.pi / 2)) % 4


def _most_turned(text: pypdfium2.PdfTextPage, count: int) -> int:
    """Return the quarter turns of most of a page's text; see `_quarters`."""
    votes = [0, 0, 0, 0]
    for index in range(0, count, max(1, count // _SAMPLE)):
        if chr(raw.FPDFText_GetUnicode(text, index)).isalnum():
            votes[_quarters(text, index)] += 1
    return votes.index(max(votes))


def _turned(
    quarters: int, left: float, bottom: float, right: float, top: float
) -> tuple[float, float, float, float]:
    if quarters == 3:
        return bottom, -right, top, -left
    if quarters == 2:
        return -right, -top, -left, -bottom
    if quarters == 1:
        return -top, left, -bottom, right
    return left, bottom, right, top


def _title(document: pypdfium2.PdfDocument) -> str:
    title = title_in(document.get_metadata_value("Title"))
    return "" if title.lower().startswith(_NO_TITLES) else title


def _pages_are(count: int) -> str:
    return "1 page" if count == 1 else f"{count:,} pages"


def _numbered(pages: list[int]) -> str:
    told = ", ".join(map(str, pages[:_NOTED_PAGES]))
    more = f" and {len(pages) - _NOTED_PAGES} more" if len(pages) > _NOTED_PAGES else ""
    return f"page{'s' if len(pages) > 1 else ''} {told}{more}"
