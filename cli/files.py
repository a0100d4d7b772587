"""Read text files below a folder in a stable order; report files that cannot be read, and go on."""

from __future__ import annotations

import fnmatch
import html.parser
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1024 * 1024  # what the server takes as one document
_SNIFF_BYTES = 8192
# fmt: off
_TEXT = frozenset({
    ".md", ".markdown", ".rst", ".txt", ".text", ".adoc", ".org", ".tex", ".html", ".htm",
    ".xml", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini", ".cfg",
    ".conf", ".log", ".py", ".pyi", ".js", ".ts", ".tsx", ".jsx", ".css", ".c", ".h", ".cc",
    ".cpp", ".hpp", ".rs", ".go", ".java", ".kt", ".rb", ".sh", ".sql", ".lua", ".swift",
    ".php", ".pl", ".r", ".proto",
})
# fmt: on
# Documents in formats that are not read: known by how a file begins (some are ASCII from end to end), and by name where
# the beginning (a zip's, or OLE's) says no more than that it is binary.
_PDF = "a PDF"
_BEGINS = {b"%PDF-": _PDF, b"%!PS": "PostScript", b"{\\rtf": "rich text (RTF)"}
_NAMED = {
    ".pdf": _PDF,
    **dict.fromkeys((".doc", ".docx", ".odt", ".rtf"), "a word processor's document"),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "a spreadsheet"),
    **dict.fromkeys((".ppt", ".pptx", ".odp"), "a presentation"),
    ".epub": "an e-book",
}
_PDF_HEAD_BYTES = 1024  # readers look for the mark in these, wherever it stands
_NEVER = frozenset({"__pycache__", "node_modules", "venv"})
_HEADING = re.compile(
    r"^(?:#{1,6}\s+(?P<atx>.+?)\s*#*|(?P<text>\S.*)\n[=~#*-]{3,})\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Item:
    """One document to store."""

    id: str
    text: str
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that could not be read: a file's id, or with `folder` everything below it.

    `no_text`: it is a document of a kind that is never read, so what is stored under its id is not its text.
    """

    id: str
    reason: str
    folder: bool = False
    no_text: bool = False


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that is not a document, and why: binary, or empty."""

    id: str
    reason: str


Found = Item | Problem | Skipped


class NotADocument(Exception):
    """A file's content is binary or empty."""


class Unreadable(Exception):
    """A file cannot be read as text; the message says why."""


class UnreadFormat(Unreadable):
    """A file is a document in a format that holds no plain text; the message names the format."""


@dataclass(frozen=True, slots=True)
class Root:
    """One path given by the user: a folder or a file, and the name its documents carry as their source."""

    path: Path
    source: str
    globs: Sequence[str] = ()
    excludes: Sequence[str] = ()
    max_bytes: int = MAX_FILE_BYTES

    def wants(self, document_id: str) -> bool:
        """Return whether --glob and --exclude let this path through."""
        name = document_id.rsplit("/", 1)[-1]
        if any(_matches(pattern, document_id) for pattern in self.excludes):
            return False
        if not self.globs:
            return True
        return any(fnmatch.fnmatchcase(t, g) for g in self.globs for t in (name, document_id))

    def documents(self) -> Iterator[Found]:
        """Yield what is found, each file read as it is reached."""
        if not self.path.is_dir():
            yield self._found(self.path, self.path.name, named=True)
            return
        problems: list[Problem] = []
        for path, document_id in self._walk(problems):
            yield from problems
            problems.clear()
            if self.wants(document_id):
                yield self._found(path, document_id)
        yield from problems

    def _walk(self, problems: list[Problem]) -> Iterator[tuple[Path, str]]:
        def failed(error: OSError) -> None:
            below = Path(error.filename or self.path)
            name = _id(below, self.path)
            problems.append(Problem(name, error.strerror or str(error), folder=True))

        for folder, folders, names in os.walk(self.path, onerror=failed):
            base = Path(folder)
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".")
                and name not in _NEVER
                and not any(_matches(p, _id(base / name, self.path)) for p in self.excludes)
            )
            for name in sorted(names):
                if not name.startswith("."):
                    yield base / name, _id(base / name, self.path)

    def _found(self, path: Path, document_id: str, *, named: bool = False) -> Found:
        try:
            document_id.encode()
        except UnicodeEncodeError:
            return Problem(ascii(document_id), "its name is not UTF-8")
        try:
            text = read(path, self.path if not named else None, self.max_bytes)
        except NotADocument as error:
            reason = str(error)
            return Problem(document_id, reason) if named else Skipped(document_id, reason)
        except UnreadFormat as error:
            return Problem(document_id, str(error), no_text=True)
        except Unreadable as error:
            return Problem(document_id, str(error))
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            return Problem(document_id, getattr(error, "strerror", "") or str(error))
        suffix = path.suffix.lower()
        title = title_of(text, suffix, path.name)
        size_bytes = len(text.encode())
        if suffix in {".html", ".htm"}:
            text, title = strip_html(text, title)
            if not text:
                return Skipped(document_id, "a page without text")
        metadata = {"source": self.source, "path": document_id, "title": title, "size": size_bytes}
        return Item(document_id, text, metadata)


def _id(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _matches(pattern: str, document_id: str) -> bool:
    """A pattern names a path, a file's name, or any folder above it."""
    pattern = pattern.rstrip("/")
    parts = document_id.split("/")
    paths = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatchcase(text, pattern) for text in (*parts, *paths))


def read(path: Path, root: Path | None, max_bytes: int) -> str:
    """Return a file's text; NotADocument, Unreadable or OSError otherwise. Links may not leave `root`."""
    if path.is_symlink() and root is not None and not path.resolve().is_relative_to(root.resolve()):
        raise NotADocument("a link to outside the folder")
    # Not blocking, so that opening a pipe in the folder does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotADocument("not a regular file")
        data = file.read(_SNIFF_BYTES)
        if kind := _unread_format(data, path.suffix.lower()):
            raise UnreadFormat(f"{kind}, which is not read: convert it to text first")
        if status.st_size > max_bytes and path.suffix.lower() not in _TEXT:
            raise NotADocument("large, and no kind of text known by its name")
        if b"\0" in data:
            raise NotADocument("binary, not text")
        data += file.read(max(0, max_bytes + 1 - len(data)))
    if len(data) > max_bytes:
        raise Unreadable(f"too large: {status.st_size} bytes; at most {max_bytes} (--max-bytes)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if path.suffix.lower() not in _TEXT:
            raise NotADocument("not UTF-8 text") from error
        raise Unreadable(f"not UTF-8: byte {data[error.start]:#04x} at {error.start}") from error
    if "\0" in text:
        raise NotADocument("binary, not text")
    if not text.strip():
        raise NotADocument("empty")
    return text


def _unread_format(data: bytes, suffix: str) -> str:
    """Return the name of a document's format that is not read, "" for anything else; `data` is how it begins."""
    for mark, kind in _BEGINS.items():
        if data.startswith(mark):
            return kind
    text = suffix in _TEXT  # a text may speak of the mark
    if not text and b"%PDF-" in data[:_PDF_HEAD_BYTES]:
        return _PDF
    return _NAMED.get(suffix, "") if b"\0" in data or suffix == ".pdf" else ""


def title_of(text: str, suffix: str, name: str) -> str:
    """Return a text's first heading (Markdown, reStructuredText), a module's first line, or the file's name."""
    head = text[:4096]
    if suffix in {".md", ".markdown", ".rst", ".txt", ".adoc"}:
        match = _HEADING.search(head)
        if match:
            return (match["atx"] or match["text"]).strip()[:200]
    elif suffix == ".py":
        docstring = re.match(r'(?:#[^\n]*\n|\s)*[rR]?("""|\'\'\')\s*([^\n"\']+)', head)
        if docstring:
            return docstring[2].strip()[:200]
    return name


class _Text(html.parser.HTMLParser):
    _BREAKS = frozenset(
        {"p", "div", "br", "li", "tr", "pre", "section", "article", "h1", "h2", "h3", "h4"}
    )
    _HIDDEN = frozenset({"script", "style", "template", "noscript"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title = ""
        self._hidden = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self._hidden += tag in self._HIDDEN
        self._in_title = tag == "title"
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self._HIDDEN and self._hidden > 0
        self._in_title = False
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._hidden:
            self.parts.append(data)


def strip_html(text: str, title: str) -> tuple[str, str]:
    """Return the readable text of a page (offsets of hits count in it) and its title."""
    parser = _Text()
    parser.feed(text)
    parser.close()
    plain = re.sub(r"[ \t]+", " ", "".join(parser.parts))
    return re.sub(r"\n\s*\n+", "\n\n", plain).strip(), parser.title.strip()[:200] or title
