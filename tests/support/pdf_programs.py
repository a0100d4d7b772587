"""Writes PDFs by as many programs as this machine has; run by an interpreter that has their packages, it needs no more.

    python tests/support/pdf_programs.py DIRECTORY <texts.json

`texts` is an object of names with pages, each a text. The programs take turns; the output says which one wrote a file,
and which were skipped, and why.
"""

from __future__ import annotations

import html
import importlib.metadata
import io
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

Pages = Sequence[str]
WIDTH = 84  # characters of a line, for programs that wrap none
TIMEOUT_S = 120


class Skipped(Exception):
    """A program that is not here; the message says what is missing."""


def _command(name: str, *words: str, given: bytes | None = None) -> bytes:
    """Run a program that is on the PATH and return its output."""
    if shutil.which(name) is None:
        raise Skipped(f"no {name} on the PATH")
    done = subprocess.run(
        [name, *words], input=given, capture_output=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Skipped(f"{name} ended with status {done.returncode}: {''.join(said)[:200]}")
    return done.stdout


def _web_page(pages: Pages) -> str:
    """Return the pages as HTML that is broken between them when it is printed."""
    parts = "".join(f"<p>{html.escape(page)}</p>" for page in pages)
    style = "p {page-break-after: always} p:last-child {page-break-after: auto}"
    return f"<!DOCTYPE html><html><head><meta charset='utf-8'><style>{style}</style></head><body>{parts}</body></html>"


def reportlab(pages: Pages, out: Path) -> None:
    """Paragraphs in ReportLab's layout."""
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate

    style = getSampleStyleSheet()["BodyText"]
    flow = [part for page in pages for part in (Paragraph(html.escape(page), style), PageBreak())]
    SimpleDocTemplate(str(out)).build(flow[:-1])


def fpdf2(pages: Pages, out: Path) -> None:
    """Justified cells of fpdf2."""
    from fpdf import FPDF

    made = FPDF()
    made.set_font("Times", size=12)
    for page in pages:
        made.add_page()
        made.multi_cell(0, 7, page)
    made.output(str(out))


def cairo(pages: Pages, out: Path) -> None:
    """Lines that cairo shows, glyph by glyph."""
    import cairocffi

    surface = cairocffi.PDFSurface(str(out), 595, 842)
    context = cairocffi.Context(surface)
    for page in pages:
        context.set_font_size(11)
        for row, line in enumerate(textwrap.wrap(page, WIDTH)):
            context.move_to(50, 60 + 15 * row)
            context.show_text(line)
        surface.show_page()
    surface.finish()


def weasyprint(pages: Pages, out: Path) -> None:
    """A web page by WeasyPrint."""
    from weasyprint import HTML

    HTML(string=_web_page(pages)).write_pdf(str(out))


def xhtml2pdf(pages: Pages, out: Path) -> None:
    """A web page by xhtml2pdf."""
    from xhtml2pdf import pisa

    with out.open("wb") as file:
        if pisa.CreatePDF(_web_page(pages), dest=file).err:
            raise Skipped("xhtml2pdf could not write it")


def typst(pages: Pages, out: Path) -> None:
    """Justified and hyphenated paragraphs of Typst."""
    import typst as compiler

    words = ["#set par(justify: true)\n", *(_typst(page) for page in pages)]
    source = out.with_suffix(".typ")
    source.write_text("#pagebreak()\n".join([words[0] + words[1], *words[2:]]), encoding="utf-8")
    try:
        compiler.compile(str(source), output=str(out))
    finally:
        source.unlink()


def _typst(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\#$*_`<>@[]" else c for c in text) + "\n"


def borb(pages: Pages, out: Path) -> None:
    """Paragraphs in a column of borb."""
    from borb.pdf import PDF, Document, Page, Paragraph, SingleColumnLayout

    document = Document()
    for text in pages:
        page = Page()
        document.append_page(page)
        SingleColumnLayout(page).append_layout_element(Paragraph(text))
    PDF.write(what=document, where_to=str(out))


def pymupdf(pages: Pages, out: Path) -> None:
    """Boxes of text by MuPDF."""
    import pymupdf as mupdf

    document = mupdf.open()
    for text in pages:
        document.new_page().insert_textbox((50, 50, 545, 790), text, fontsize=11)
    document.save(str(out), deflate=True, garbage=3)


def matplotlib(pages: Pages, out: Path) -> None:
    """Figures of matplotlib, whose letters are drawn by fonts of type 3."""
    import matplotlib as mpl

    mpl.use("pdf")
    from matplotlib import pyplot as plt
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(str(out)) as made:
        for text in pages:
            figure = plt.figure(figsize=(8.27, 11.69))
            figure.text(0.08, 0.94, "\n".join(textwrap.wrap(text, WIDTH)), fontsize=10, va="top")
            made.savefig(figure)
            plt.close(figure)


def pypdf(pages: Pages, out: Path) -> None:
    """A file of ReportLab's, written anew by pypdf."""
    from pypdf import PdfWriter

    reportlab(pages, out)
    made = PdfWriter(clone_from=io.BytesIO(out.read_bytes()))
    for page in made.pages:
        page.compress_content_streams()
    made.write(str(out))


def pikepdf(pages: Pages, out: Path) -> None:
    """A file of ReportLab's, linearised and in object streams, by qpdf."""
    import pikepdf as qpdf

    reportlab(pages, out)
    with qpdf.open(io.BytesIO(out.read_bytes())) as document:
        streams = qpdf.ObjectStreamMode.generate
        document.save(str(out), linearize=True, object_stream_mode=streams)


def owned(pages: Pages, out: Path) -> None:
    """A file that anybody may read and only its owner may change, by qpdf."""
    import pikepdf as qpdf

    reportlab(pages, out)
    with qpdf.open(io.BytesIO(out.read_bytes())) as document:
        document.save(str(out), encryption=qpdf.Encryption(owner="owner", user="", R=6))


def groff(pages: Pages, out: Path) -> None:
    """Running text of groff, as PDF or by Ghostscript."""
    roff = ".bp\n".join(f"{page}\n" for page in pages).encode()
    try:
        out.write_bytes(_command("groff", "-Tpdf", given=roff))
    except Skipped:
        paper = _command("groff", "-Tps", given=roff)
        out.write_bytes(_command("ps2pdf", "-", "-", given=paper))


def chromium(pages: Pages, out: Path) -> None:
    """A web page as Chromium prints it."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(_web_page(pages), encoding="utf-8")
        _command(
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer",
            f"--user-data-dir={folder}/profile", f"--print-to-pdf={out}", str(page),
        )  # fmt: skip


def libreoffice(pages: Pages, out: Path) -> None:
    """A web page by LibreOffice Writer."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / f"{out.stem}.html"
        page.write_text(_web_page(pages), encoding="utf-8")
        _command(
            "soffice", "--headless", f"-env:UserInstallation=file://{folder}/profile",
            "--convert-to", "pdf:writer_web_pdf_Export", "--outdir", str(out.parent), str(page),
        )  # fmt: skip


def pandoc(pages: Pages, out: Path) -> None:
    """LaTeX by pandoc."""
    text = "\n\n\\newpage\n\n".join(pages).encode()
    _command("pandoc", "-f", "markdown", "-o", str(out), given=text)


PROGRAMS: dict[str, Callable[[Pages, Path], None]] = {
    "ReportLab": reportlab,
    "fpdf2": fpdf2,
    "cairo": cairo,
    "WeasyPrint": weasyprint,
    "xhtml2pdf": xhtml2pdf,
    "Typst": typst,
    "borb": borb,
    "MuPDF": pymupdf,
    "matplotlib": matplotlib,
    "pypdf": pypdf,
    "qpdf": pikepdf,
    "qpdf, with an owner's password": owned,
    "groff": groff,
    "Chromium": chromium,
    "LibreOffice": libreoffice,
    "pandoc": pandoc,
}


def write(directory: Path, texts: dict[str, Pages]) -> tuple[dict[str, str], dict[str, str]]:
    """Write a PDF of each name; return the program of each, and why each missing program was skipped."""
    left, skipped = list(PROGRAMS), dict[str, str]()
    wrote: dict[str, str] = {}
    names = list(texts)
    while len(wrote) < len(names):
        if not left:
            raise SystemExit(f"no program here writes PDFs: {skipped}")
        program, name = left.pop(0), names[len(wrote)]
        try:
            PROGRAMS[program](texts[name], directory / f"{name}.pdf")
        except (Skipped, ImportError, OSError, importlib.metadata.PackageNotFoundError) as error:
            skipped[program] = " ".join(str(error).split())[:200]
        else:
            wrote[name] = program
            left.append(program)
    return wrote, skipped


def main() -> None:
    """Write what standard input asks for."""
    wrote, skipped = write(Path(sys.argv[1]), json.load(sys.stdin))
    for name, program in wrote.items():
        print(f"{name}.pdf: {program}")
    for program, why in skipped.items():
        print(f"skipped: {program}: {why}")


if __name__ == "__main__":
    main()
