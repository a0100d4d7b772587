"""The reader of presentations (PPTX): each slide's text in the order of its shapes, and the speaker's notes."""

from __future__ import annotations

import posixpath
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from cli.readers.archive import opened, tree
from cli.readers.reading import (
    MAX_PAGES,
    Reading,
    Textless,
    Unreadable,
    clean,
    joined,
    title_in,
)

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_LINKS = "{http://schemas.openxmlformats.org/package/2006/relationships}Relationship"
_PRESENTATION = "ppt/presentation.xml"
_TITLES = {"title", "ctrTitle"}


def read_slides(file: BinaryIO) -> Reading:
    """Return a presentation's text with its slides as pages; Unreadable or Textless otherwise."""
    archive = opened(file, _PRESENTATION)
    try:
        slides = list(_slides(archive))
    except (ET.ParseError, KeyError, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise Unreadable("a damaged presentation") from error
    texts = [clean(text).strip() for text in slides]
    if not any(texts):
        raise Textless(f"{len(texts)} slides without text")
    first = next(text for text in texts if text).split("\n", 1)[0]
    return joined(texts, title_in(first.lstrip("# ")))


def _slides(archive: zipfile.ZipFile) -> Iterator[str]:
    links = _links(archive, _PRESENTATION)
    listed = tree(archive, _PRESENTATION).iter(f"{_P}sldId")
    names = [links[slide.attrib[f"{_R}id"]][1] for slide in listed]
    if len(names) > MAX_PAGES:
        raise Unreadable(f"{len(names):,} slides; at most {MAX_PAGES:,} are read")
    for name in names:
        parts = [_slide(tree(archive, name))]
        for kind, target in _links(archive, name).values():
            if kind.endswith("/notesSlide"):
                told = _slide(tree(archive, target), kinds={"body"})
                parts += [f"Notes: {told}"] if told else []
        yield "\n\n".join(part for part in parts if part)


def _links(archive: zipfile.ZipFile, name: str) -> dict[str, tuple[str, str]]:
    """Return a part's links within the archive by id: the kind and the name of each target."""
    folder, file = posixpath.split(name)
    try:
        root = tree(archive, f"{folder}/_rels/{file}.rels")
    except KeyError:
        return {}
    return {
        link.get("Id", ""): (
            link.get("Type", ""),
            posixpath.normpath(posixpath.join("/", folder, link.get("Target", ""))).lstrip("/"),
        )
        for link in root.iter(_LINKS)
        if link.get("TargetMode") != "External"
    }


def _slide(root: ET.Element, kinds: set[str] | None = None) -> str:
    """Return the text of all shapes, or of those whose placeholder is of these kinds."""
    blocks: list[str] = []
    for shape in root.iter():
        if shape.tag == f"{_P}sp":
            place = shape.find(f"{_P}nvSpPr/{_P}nvPr/{_P}ph")
            kind = "" if place is None else place.get("type", "body")
            if kinds is not None and kind not in kinds:
                continue
            text = _lines(shape)
            blocks += (
                [f"# {text}" if kind in _TITLES and "\n" not in text else text] if text else []
            )
        elif shape.tag == f"{_A}tbl" and kinds is None:
            rows = [
                [_lines(cell).replace("\n", " ") for cell in row.iter(f"{_A}tc")]
                for row in shape.iter(f"{_A}tr")
            ]
            blocks.append("\n".join(" | ".join(row) for row in rows))
    return "\n\n".join(blocks)


def _lines(shape: ET.Element) -> str:
    """Return a shape's paragraphs, a line each."""
    lines = []
    for paragraph in shape.iter(f"{_A}p"):
        runs = [
            "\n" if run.tag == f"{_A}br" else run.text or ""
            for run in paragraph.iter()
            if run.tag in {f"{_A}t", f"{_A}br"}
        ]
        lines.append("".join(runs).strip())
    return "\n".join(line for line in lines if line)
