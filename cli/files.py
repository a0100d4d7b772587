"""Documents below a folder: found in a stable order, and read; unreadable files are reported and passed over."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cli.readers.reading import Reading, Textless, Unreadable

MAX_FILE_BYTES = 1024 * 1024  # size of a text
MAX_DOCUMENT_BYTES = 256 * 1024 * 1024  # size of a PDF, DOCX or PPTX, mostly of pictures
MAX_PART_BYTES = 1024 * 1024  # size of one document at the server
_SNIFF_BYTES = 8192
# fmt: off
_TEXT = frozenset({
    ".md", ".markdown", ".rst", ".txt", ".text", ".adoc", ".org", ".tex", ".html", ".htm", ".xhtml",
    ".xml", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".ini", ".cfg",
    ".conf", ".log", ".py", ".pyi", ".js", ".ts", ".tsx", ".jsx", ".css", ".c", ".h", ".cc",
    ".cpp", ".hpp", ".cs", ".rs", ".go", ".java", ".kt", ".scala", ".rb", ".sh", ".sql", ".lua", ".swift",
    ".php", ".pl", ".r", ".jl", ".ex", ".hs", ".ml", ".dart", ".zig", ".ps1", ".bat", ".proto", ".srt",
})
# fmt: on
_PAGES = frozenset({".html", ".htm", ".xhtml"})
_READ = {".docx": "docx", ".pptx": "pptx"}
# Formats that are not read: known by a file's first bytes (some formats are ASCII throughout), or by its name if the
# first bytes (a zip's, or OLE's) only show that it is binary.
_BEGINS = {b"%!PS": "PostScript", b"{\\rtf": "rich text (RTF)"}
_NAMED = {
    **dict.fromkeys((".doc", ".odt", ".rtf"), "a word processor's document"),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "a spreadsheet"),
    **dict.fromkeys((".ppt", ".odp"), "a presentation"),
    ".epub": "an e-book",
}
_PDF_HEAD_BYTES = 1024  # PDF readers accept the mark anywhere in these bytes
_NEVER = frozenset({"__pycache__", "node_modules", "venv"})
_PART = re.compile(r"#[0-9]+\Z")
_HEADING = re.compile(
    r"^(?:#{1,6}\s+(?P<atx>.+?)\s*#*|(?P<text>\S.*)\n[=~#*-]{3,})\s*$", re.MULTILINE
)


class Reader(Protocol):
    """Reads an open file of a kind: "pdf", "docx", "pptx", "html" or "text"."""

    def read(self, descriptor: int, kind: str) -> Reading:
        """Return the text; Unreadable or Textless otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """One document to store: a file, or a part of one; `note` is a remark on it for people."""

    id: str
    text: str
    metadata: dict[str, Any]
    note: str = ""

    @property
    def begins(self) -> bool:
        """Whether the item is the first part of a file, or the whole file."""
        return int(self.metadata.get("part", 1)) == 1


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that could not be read, by its id, or, with `folder`, all files below a folder.

    With `no_text` the file has no readable text, so a document stored under its id is out of date.
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


class UnreadFormat(Unreadable):
    """The file is a document in a format that is not read; the message names the format."""


@dataclass(frozen=True, slots=True)
class Root:
    """One path given by the user: a folder or a file, and the name of its documents' source.

    `reader` reads files that are no text in UTF-8; without a reader these are problems. `max_bytes` bounds texts.
    """

    path: Path
    source: str
    globs: Sequence[str] = ()
    excludes: Sequence[str] = ()
    max_bytes: int = MAX_FILE_BYTES
    reader: Reader | None = None

    def wants(self, document_id: str) -> bool:
        """Return whether --glob and --exclude let a document's path through."""
        document_id = _PART.sub("", document_id)
        name = document_id.rsplit("/", 1)[-1]
        if any(_matches(pattern, document_id) for pattern in self.excludes):
            return False
        if not self.globs:
            return True
        return any(fnmatch.fnmatchcase(t, g) for g in self.globs for t in (name, document_id))

    def count(self) -> int:
        """Return the number of files to look at."""
        if not self.path.is_dir():
            return 1
        return sum(isinstance(each, tuple) and self.wants(each[1]) for each in self._walk())

    def documents(self) -> Iterator[Found]:
        """Yield documents, problems and skipped files; each file is read when its turn comes."""
        if not self.path.is_dir():
            yield from self._found(self.path, self.path.name, named=True)
            return
        for each in self._walk():
            if not isinstance(each, tuple):
                yield each
            elif self.wants(each[1]):
                yield from self._found(*each)

    def _walk(self) -> Iterator[tuple[Path, str] | Problem | Skipped]:
        """Yield files with their ids, and skipped folders with the reason."""
        failed: list[OSError] = []
        for folder, folders, names in os.walk(self.path, onerror=failed.append):
            yield from map(self._unlisted, failed)
            failed.clear()
            base = Path(folder)
            wanted = [
                name
                for name in sorted(folders)
                if not any(_matches(p, _id(base / name, self.path)) for p in self.excludes)
            ]
            folders[:] = [name for name in wanted if not _left_out(name)]
            for name in wanted:
                if reason := _left_out(name):
                    yield Skipped(f"{_id(base / name, self.path)}/", reason)
            for name in sorted(names):
                document_id = _id(base / name, self.path)
                if not name.startswith("."):
                    yield base / name, document_id
                elif self.wants(document_id):
                    yield Skipped(document_id, "hidden")
        yield from map(self._unlisted, failed)

    def _unlisted(self, error: OSError) -> Problem:
        below = Path(error.filename or self.path)
        return Problem(_id(below, self.path), error.strerror or str(error), folder=True)

    def _found(self, path: Path, document_id: str, *, named: bool = False) -> Iterator[Found]:
        try:
            document_id.encode()
        except UnicodeEncodeError:
            yield Problem(ascii(document_id), "its name is not UTF-8")
            return
        try:
            reading, size_bytes = self._read(path, self.path if not named else None)
        except (NotADocument, Textless) as error:
            scan = isinstance(error, Textless) and path.suffix.lower() not in _TEXT
            if named or scan:  # named by the user, or a scan without text
                yield Problem(document_id, str(error), no_text=isinstance(error, Textless))
            else:
                yield Skipped(document_id, str(error))
        except UnreadFormat as error:
            yield Problem(document_id, str(error), no_text=True)
        except Unreadable as error:
            yield Problem(document_id, str(error))
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            yield Problem(document_id, getattr(error, "strerror", "") or str(error))
        else:
            title = reading.title or title_of(reading.text, path.suffix.lower(), path.name)
            metadata = {
                "source": self.source,
                "path": document_id,
                "title": title,
                "size": size_bytes,
                **({"encoding": reading.encoding} if reading.encoding else {}),
            }
            yield from parts(document_id, reading, metadata)

    def _read(self, path: Path, root: Path | None) -> tuple[Reading, int]:
        """Return a file's text and its size in bytes; NotADocument for a link to outside of `root`."""
        if (
            path.is_symlink()
            and root is not None
            and not path.resolve().is_relative_to(root.resolve())
        ):
            raise NotADocument("a link to outside the folder")
        # O_NONBLOCK: opening a pipe in the folder must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotADocument("not a regular file")
            suffix = path.suffix.lower()
            head = file.read(_SNIFF_BYTES)
            kind = _kind(head, suffix)
            if kind in {"text", "html"}:
                data = _text_bytes(file, head, suffix, status.st_size, self.max_bytes)
                if kind == "text" and (reading := _utf8(data)) is not None:
                    return reading, status.st_size
            elif status.st_size > MAX_DOCUMENT_BYTES:
                raise Unreadable(f"too large: {status.st_size} bytes; at most {MAX_DOCUMENT_BYTES}")
            if self.reader is None:
                raise Unreadable("no text in UTF-8")
            try:
                return self.reader.read(descriptor, kind), status.st_size
            except Unreadable as error:
                if kind == "text" and suffix not in _TEXT:
                    raise NotADocument("not text in a known encoding") from error
                raise


def _id(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _matches(pattern: str, document_id: str) -> bool:
    """Return whether a pattern matches a path, its file's name, or any folder above it."""
    pattern = pattern.rstrip("/")
    parts = document_id.split("/")
    paths = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatchcase(text, pattern) for text in (*parts, *paths))


def _left_out(folder: str) -> str:
    """Return the reason why a folder is skipped; "" if it is not."""
    if folder.startswith("."):
        return "a hidden folder"
    return "a folder of what programs made or installed" if folder in _NEVER else ""


def _kind(head: bytes, suffix: str) -> str:
    """Return the kind of reader for a file that begins with `head`; UnreadFormat for a format without a reader."""
    text = suffix in _TEXT  # a text may contain a format's mark
    if (
        head.startswith(b"%PDF-")
        or (not text and b"%PDF-" in head[:_PDF_HEAD_BYTES])
        or suffix == ".pdf"
    ):
        return "pdf"
    kind = next((kind for mark, kind in _BEGINS.items() if head.startswith(mark)), "")
    if not kind and b"\0" in head:
        if suffix in _READ:
            return _READ[suffix]
        kind = _NAMED.get(suffix, "")
    if kind:
        raise UnreadFormat(f"{kind}, which is not read: convert it to text or PDF first")
    return "html" if suffix in _PAGES else "text"


def _text_bytes(file: BinaryIO, head: bytes, suffix: str, size: int, most: int) -> bytes:
    """Return a text's bytes; NotADocument for another file, Unreadable for a text that is too large."""
    if size > most and suffix not in _TEXT:
        raise NotADocument("large, and no kind of text known by its name")
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
        raise NotADocument("binary, not text")
    data = head + file.read(max(0, most + 1 - len(head)))
    if len(data) > most:
        raise Unreadable(f"too large: {size} bytes; at most {most} (--max-bytes)")
    if not data.strip():
        raise NotADocument("empty")
    return data


def _utf8(data: bytes) -> Reading | None:
    """Return the text of bytes in UTF-8; None for other encodings."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        raise NotADocument("binary, not text")
    if not text.strip():
        raise NotADocument("empty")
    return Reading(text)


def parts(document_id: str, reading: Reading, metadata: dict[str, Any]) -> Iterator[Item]:
    """Yield a document as one item, or in parts small enough for the server, cut between pages or lines if possible.

    Part 1 has the document's id, part n that id with `#n`. In an item's metadata `pages` holds the characters at which
    its pages start, and `first_page` the number of the first of them.
    """
    text, starts = reading.text, reading.pages
    cuts = _cuts(text, starts, MAX_PART_BYTES)
    for number, (begin, end) in enumerate(pairwise(cuts), 1):
        told = dict(metadata)
        if starts:
            first = max(0, bisect_right(starts, begin) - 1)
            last = max(first + 1, bisect_left(starts, end))
            told["first_page"] = first + 1
            told["pages"] = [max(0, start - begin) for start in starts[first:last]]
        if len(cuts) > 2:
            told |= {"part": number, "parts": len(cuts) - 1}
        name = document_id if number == 1 else f"{document_id}#{number}"
        yield Item(name, text[begin:end], told, reading.note if number == 1 else "")


def _cuts(text: str, starts: Sequence[int], most: int) -> list[int]:
    """Return the characters at which a text is cut, from 0 to its length, with at most `most` bytes between two."""
    cuts = [0]
    while len(text[cuts[-1] :].encode()) > most:
        begin = cuts[-1]
        end = begin + len(text[begin : begin + most].encode()[:most].decode(errors="ignore"))
        page = starts[bisect_right(starts, end) - 1] if starts else 0
        line = text.rfind("\n", begin + 1, end) + 1
        cuts.append(page if page > begin else line if line > begin else end)
    return [*cuts, len(text)]


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
