"""PDFs that real programs wrote: their words as they were given, each on its page."""

from __future__ import annotations

import io
from pathlib import Path

from cli.readers.pdf import read_pdf
from tests.support import handbook_pdfs


def test_pdfs_of_real_programs(tmp_path: Path) -> None:
    """ReportLab and matplotlib are always there, others where they are installed (`tests/support/pdf_programs.py`)."""
    told = handbook_pdfs.write(tmp_path).splitlines()
    programs = dict(line.split(": ", 1) for line in told if not line.startswith("skipped"))
    assert {"ReportLab", "matplotlib"} <= set(programs.values())
    assert len(programs) == handbook_pdfs.COUNT
    for name, program in programs.items():
        reading = read_pdf(io.BytesIO((tmp_path / name).read_bytes()))
        first, second = handbook_pdfs.texts()[name.removesuffix(".pdf")]
        assert len(reading.pages) == 2, program
        there = reading.text[: reading.pages[1]], reading.text[reading.pages[1] :]
        assert [" ".join(page.split()) for page in there] == [first, second], program
