"""Files become documents; what cannot be read is reported and stops nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.files import Found, Item, Problem, Root, Skipped, title_of
from cli.readers.reading import Reading, Textless, Unreadable


class Told:
    """A reader that tells what it was asked to read: a file's kind."""

    def read(self, descriptor: int, kind: str) -> Reading:
        head = os.pread(descriptor, 32, 0)
        if b"scan" in head:
            raise Textless("a scan: 1 page without text")
        if b"locked" in head:
            raise Unreadable("encrypted")
        return Reading(f"text of a {kind}", note="a note" if b"noted" in head else "")


def found(path: Path, **options: object) -> dict[str, Found]:
    root = Root(path, "s", **{"reader": Told(), **options})  # type: ignore[arg-type]
    return {item.id: item for item in root.documents()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "guide").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "guide" / "start.md").write_text("intro\n\n# Getting *started*\n\ntext")
    (tmp_path / "guide" / "deep.rst").write_text("Deep\n====\n\ntext")
    (tmp_path / "module.py").write_text('"""What it is for.\n\nMore."""\n')
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "node_modules" / "x.md").write_text("not ours")
    return tmp_path


def test_ids_titles_and_sizes(folder: Path) -> None:
    """Ids are paths below the root; metadata says what a reader needs, and nothing that a copy would change."""
    items = found(folder)
    hidden = [items.pop(name) for name in (".git/", "node_modules/")]

    assert hidden == [
        Skipped(".git/", "a hidden folder"),
        Skipped("node_modules/", "a folder of what programs made or installed"),
    ]
    assert list(items) == ["module.py", "guide/deep.rst", "guide/start.md"]
    assert Root(folder, "s").count() == 3
    start = items["guide/start.md"]
    assert isinstance(start, Item)
    assert start.metadata == {
        "source": "s",
        "path": "guide/start.md",
        "title": "Getting *started*",
        "size": 32,
    }


def test_modification_time_changes_nothing(folder: Path) -> None:
    """Touching a file gives the same document."""
    before = found(folder)
    os.utime(folder / "module.py", (1, 1))

    assert found(folder) == before


def test_globs_and_excludes(folder: Path) -> None:
    """--glob takes names or paths; --exclude takes those, and folders with all below."""
    out = [".git", "node_modules"]
    assert list(found(folder, globs=["*.md"], excludes=out)) == ["guide/start.md"]
    assert list(found(folder, globs=["guide/*"], excludes=["*.rst", *out])) == ["guide/start.md"]
    assert list(found(folder, excludes=["guide", *out])) == ["module.py"]
    assert Root(folder, "s", globs=["*.pdf"]).wants("a.pdf#2")  # a part


def test_bad_files_are_problems(tmp_path: Path) -> None:
    """Too large, a name that is not UTF-8, what its reader refuses: each is named with its reason, the rest goes on."""
    (tmp_path / "a.md").write_text("good")
    (tmp_path / "large.txt").write_text("x" * 2000)
    (tmp_path / "scan.pdf").write_bytes(b"%PDF-1.4 scan")
    (tmp_path / "locked.docx").write_bytes(b"PK\3\4\0locked")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("x")
    items = found(tmp_path, max_bytes=1000)

    assert isinstance(items["a.md"], Item)
    assert [item for item in items.values() if not isinstance(item, Item)] == [
        Problem("large.txt", "too large: 2000 bytes; at most 1000 (--max-bytes)"),
        Problem("locked.docx", "encrypted"),
        Problem("scan.pdf", "a scan: 1 page without text", no_text=True),
        Problem("'\\udcff.txt'", "its name is not UTF-8"),
    ]


def test_what_is_no_text_is_skipped(tmp_path: Path) -> None:
    """Binary files, empty files, pipes and links that leave the folder are no documents, and no errors."""
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("outside")
    (tmp_path / "in" / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "in" / "unknown.bin").write_bytes(b"locked \xff\xfe\xfd")
    (tmp_path / "in" / ".hidden").write_text("hidden")
    (tmp_path / "in" / "empty.md").write_text(" \n")
    (tmp_path / "in" / "link.txt").symlink_to("../secret.txt")
    os.mkfifo(tmp_path / "in" / "pipe.txt")

    reasons = {i.id: i.reason for i in found(tmp_path / "in").values() if isinstance(i, Skipped)}
    assert reasons == {
        "image.png": "binary, not text",
        "unknown.bin": "not text in a known encoding",
        ".hidden": "hidden",
        "empty.md": "empty",
        "link.txt": "a link to outside the folder",
        "pipe.txt": "not a regular file",
    }


ASCII_PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\n%%EOF\n"
READ = {
    "ascii.pdf": (ASCII_PDF, "pdf"),
    "late.pdf": (b"junk before it\n" + ASCII_PDF, "pdf"),
    "renamed.txt": (ASCII_PDF, "pdf"),
    "unnamed": (b"\n" + ASCII_PDF, "pdf"),
    "usual.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n\0", "pdf"),
    "large.pdf": (ASCII_PDF * 40, "pdf"),
    "broken.pdf": (b"no mark at all", "pdf"),
    "letter.docx": (b"PK\3\4\x14\0\6\0", "docx"),
    "slides.PPTX": (b"PK\3\4\x14\0\6\0", "pptx"),
    "page.htm": (b"<p>text", "html"),
    "latin.txt": (b"caf\xe9", "text"),
    "wide.txt": ("text".encode("utf-16"), "text"),
}
UNREAD = {
    "print.ps": (b"%!PS-Adobe-3.0\n/Times findfont\n", "PostScript"),
    "letter.rtf": (b"{\\rtf1\\ansi Dear all}", "rich text (RTF)"),
    "letter.doc": (b"\xd0\xcf\x11\xe0\0\0", "a word processor's document"),
    "sums.xlsx": (b"PK\3\4\x14\0\6\0", "a spreadsheet"),
}


@pytest.mark.parametrize("name", READ)
def test_formats_are_known(name: str, tmp_path: Path) -> None:
    """A file goes to the reader of its format, which its beginning tells before its name; what is noted is kept."""
    data, kind = READ[name]
    (tmp_path / name).write_bytes(data)
    items = found(tmp_path, max_bytes=1000)

    assert [getattr(item, "text", item) for item in items.values()] == [f"text of a {kind}"]
    (tmp_path / name).write_bytes(b"%PDF-noted")
    assert [getattr(item, "note", item) for item in found(tmp_path).values()] == ["a note"]


@pytest.mark.parametrize("name", UNREAD)
def test_documents_of_other_formats_are_named(name: str, tmp_path: Path) -> None:
    """A document that nothing reads is a problem that names its format; its bytes are never stored as text."""
    data, kind = UNREAD[name]
    (tmp_path / name).write_bytes(data)
    expected = Problem(
        name, f"{kind}, which is not read: convert it to text or PDF first", no_text=True
    )

    assert found(tmp_path, max_bytes=1000) == {name: expected}
    assert found(tmp_path / name, max_bytes=1000) == {name: expected}


def test_texts_about_other_formats_are_texts(tmp_path: Path) -> None:
    """A text that speaks of a format's mark is a text."""
    (tmp_path / "formats.md").write_text("A PDF begins with %PDF-1.7, PostScript with %!PS.")
    (tmp_path / "notes.doc").write_text("plain text under an old name")

    assert all(isinstance(item, Item) for item in found(tmp_path).values())


def test_links_inside_the_folder_are_read(tmp_path: Path) -> None:
    """A link to a file of the same folder is a document of its own; a link to nothing is a problem."""
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "b.md").symlink_to("a.md")
    (tmp_path / "c.md").symlink_to("gone.md")
    items = found(tmp_path)

    assert isinstance(items["b.md"], Item)
    assert isinstance(items["c.md"], Problem)


def test_a_named_file(tmp_path: Path) -> None:
    """A file given by name is one document; if it is no text, that is an error, as it was asked for."""
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\0")

    assert list(found(tmp_path / "a.md")) == ["a.md"]
    assert isinstance(found(tmp_path / "b.bin")["b.bin"], Problem)


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    """A file deleted between listing and reading is reported; the others are read."""
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "b.md").write_text("text")
    iterator = Root(tmp_path, "s").documents()
    first = next(iterator)
    (tmp_path / "b.md").unlink()

    assert isinstance(first, Item)
    assert list(iterator) == [Problem("b.md", "No such file or directory")]


def test_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    """A folder that cannot be listed is a problem that covers all below it."""
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "gone").mkdir()
    iterator = Root(tmp_path, "s").documents()
    next(iterator)
    (tmp_path / "gone").rmdir()

    assert list(iterator) == [Problem("gone", "No such file or directory", folder=True)]


def test_titles() -> None:
    """Without a heading the name is the title."""
    assert title_of('#!/usr/bin/python\n# c\nr"""Doc."""', ".py", "x.py") == "Doc."
    assert title_of("import os", ".py", "x.py") == "x.py"
    assert title_of("plain", ".txt", "x.txt") == "x.txt"
