"""Documents made by the programs and libraries that make them: ReportLab, Chromium, python-docx, python-pptx."""

from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas

LEADING = 14.0
TOP = 780.0
Draw = Callable[[Canvas], None]


def pdf(*pages: Draw, password: str = "", title: str = "") -> bytes:
    """Return a PDF with a page for each function, which draws it."""
    out = io.BytesIO()
    encrypt = StandardEncryption(password, "owner") if password else None
    canvas = Canvas(out, pagesize=A4, encrypt=encrypt)
    if title:
        canvas.setTitle(title)
    for draw in pages:
        canvas.setFont("Helvetica", 10)
        draw(canvas)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def lines(texts: Sequence[str], left: float = 50.0, top: float = TOP) -> Draw:
    """Return a page of lines from the top down."""

    def draw(canvas: Canvas) -> None:
        for row, text in enumerate(texts):
            canvas.drawString(left, top - LEADING * row, text)

    return draw


def across(left: Sequence[str], right: Sequence[str]) -> Draw:
    """Return a page of two columns that is written line by line across both, as some programs do."""

    def draw(canvas: Canvas) -> None:
        for row in range(max(len(left), len(right))):
            for column, at in ((left, 50), (right, 310)):
                if row < len(column):
                    canvas.drawString(at, TOP - LEADING * row, column[row])

    return draw


def both(*some: Draw) -> Draw:
    """Return a page on which all of these are drawn, one after the other."""

    def draw(canvas: Canvas) -> None:
        for one in some:
            one(canvas)

    return draw


def sideways(texts: Sequence[str], degrees: int) -> Draw:
    """Return a page whose rotation makes text upright that was drawn turned, as scanners and plotters write them."""

    def draw(canvas: Canvas) -> None:
        canvas.setPageRotation(degrees)
        width, height = A4
        canvas.saveState()
        canvas.translate(*{90: (width, 0), 180: (width, height), 270: (0, height)}[degrees])
        canvas.rotate(degrees)
        canvas.setFont("Helvetica", 10)
        for row, text in enumerate(texts):
            canvas.drawString(60, 400 - LEADING * row, text)
        canvas.restoreState()

    return draw


def in_cid_font(text: str, font: str) -> Draw:
    """Return a page of Chinese, Japanese or Korean in a font that readers have of their own."""
    pdfmetrics.registerFont(UnicodeCIDFont(font))

    def draw(canvas: Canvas) -> None:
        canvas.setFont(font, 12)
        canvas.drawString(50, TOP, text)

    return draw


def in_font(text: str, file: Path) -> Draw:
    """Return a page in an embedded font."""
    pdfmetrics.registerFont(TTFont(file.stem, str(file)))

    def draw(canvas: Canvas) -> None:
        canvas.setFont(file.stem, 12)
        canvas.drawString(50, TOP, text)

    return draw


def picture() -> Draw:
    """Return a page that holds a picture and no text, as a scanner makes it."""
    from PIL import Image

    image = ImageReader(Image.new("L", (200, 280), 200))

    def draw(canvas: Canvas) -> None:
        canvas.drawImage(image, 0, 0, *A4)

    return draw


def printed(page: str, folder: Path) -> bytes:
    """Return a web page as Chromium prints it; skips the test where Chromium is missing."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing; `make setup-full` installs it")
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    profile = f"--user-data-dir={folder / 'profile'}"
    subprocess.run(
        [
            chromium,
            *flags,
            profile,
            f"--print-to-pdf={folder / 'page.pdf'}",
            str(folder / "page.html"),
        ],
        capture_output=True,
        check=True,
        timeout=120,
    )
    return (folder / "page.pdf").read_bytes()


def archive(entries: dict[str, bytes], *, stored: bool = False) -> bytes:
    """Return a zip archive."""
    out = io.BytesIO()
    method = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return out.getvalue()


def replaced(data: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """Return an archive with one entry changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries = {entry: file.read(entry) for entry in file.namelist()}
    return archive({**entries, name: change(entries.get(name, b""))})


def docx() -> bytes:
    """Return a document with headings, a list, a table, Japanese, a ligature and a title."""
    import docx as library

    made = library.Document()
    made.core_properties.title = "Of gates"
    made.add_heading("The dam", 1)
    made.add_paragraph("The o\ufb03ce keeps the keys.")
    sentence = made.add_paragraph("A ")
    sentence.add_run("bold").bold = True
    sentence.add_run(" word.")
    for item in ("one", "two"):
        made.add_paragraph(item, style="List Bullet")
    table = made.add_table(2, 2)
    for place, text in enumerate(("Gate", "Width", "North", "12 m")):
        table.cell(place // 2, place % 2).text = text
    made.add_heading("Second", 2)
    made.add_paragraph("東京都の水道局。")
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def pptx() -> bytes:
    """Return two slides: a list with speaker's notes, and a table beside a group of shapes."""
    import pptx as library
    from pptx.util import Inches

    made = library.Presentation()
    first = made.slides.add_slide(made.slide_layouts[1])
    first.shapes.title.text = "Slide one"
    first.placeholders[1].text = "First\nSecond"
    first.notes_slide.notes_text_frame.text = "Say it slowly."
    second = made.slides.add_slide(made.slide_layouts[5])
    second.shapes.title.text = "Gates"
    table = second.shapes.add_table(2, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table
    for place, text in enumerate(("Gate", "Width", "North", "12 m")):
        table.cell(place // 2, place % 2).text = text
    group = second.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 100, 100).text_frame.text = "In a group"
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()
