"""The reader of word processors' documents (DOCX), by mammoth: as a web page with headings, lists, tables and notes."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
import zipfile
from typing import BinaryIO

import mammoth

from cli.readers.archive import opened, tree
from cli.readers.reading import Reading, Textless, Unreadable, title_in
from cli.readers.web_page import read_web_page

_TITLE = "{http://purl.org/dc/elements/1.1/}title"


def read_word_document(file: BinaryIO) -> Reading:
    """Return a document's text; Unreadable or Textless otherwise. Pictures and linked files are not read."""
    archive = opened(file, "word/document.xml")
    title = _title(archive)
    file.seek(0)
    try:
        page = mammoth.convert_to_html(
            io.BytesIO(file.read()),  # without a name, beside which mammoth would look
            ignore_empty_paragraphs=True,
            convert_image=mammoth.images.img_element(lambda _: {}),
        ).value
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a malformed file may raise any error
        raise Unreadable("a damaged document") from error
    try:
        reading = read_web_page(page)
    except Textless as error:
        raise Textless("a document without text") from error
    return Reading(reading.text, title)


def _title(archive: zipfile.ZipFile) -> str:
    try:
        return title_in(tree(archive, "docProps/core.xml").findtext(_TITLE) or "")
    except (KeyError, ET.ParseError, zipfile.BadZipFile):
        return ""
