"""Real texts to embed: docstrings of installed packages, and manuals of Python, PostgreSQL and Linux by Debian."""

from __future__ import annotations

import random
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path

from bench.workloads.vectors import PIECE, docstrings_of

MANUALS = ("python3.11-doc", "postgresql-doc-15", "linux-doc-6.1")  # Debian 12's
FETCH_S = 300.0
_BLOCKS = frozenset(("p", "pre", "li", "dd", "dt", "td", "h1", "h2", "h3"))
_SILENT = frozenset(("script", "style", "head", "nav"))


class NoTextsError(Exception):
    """There are not as many texts as were asked for, or they cannot be had on this machine."""


def package_docstrings(limit: int, seed: int) -> list[str]:
    """Return `limit` pieces of the installed packages' docstrings, drawn by the seed."""
    paths = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    return _drawn(
        (text for path in paths for text in docstrings_of(path)), limit, seed, "docstrings"
    )


def manuals(limit: int, folder: Path, seed: int) -> list[str]:
    """Return `limit` pieces of the manuals, drawn by the seed; their packages are unpacked below `folder`."""
    for name in MANUALS:
        _unpack(name, folder)
    paths = sorted((folder / "usr" / "share" / "doc").rglob("*.html"))
    pages = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return _drawn((piece for page in pages for piece in pieces(page)), limit, seed, "manuals")


def _drawn(texts: Iterable[str], limit: int, seed: int, name: str) -> list[str]:
    every = list(dict.fromkeys(texts))
    if len(every) < limit:
        raise NoTextsError(f"{name}: {len(every)} pieces; expected {limit}")
    return random.Random(seed).sample(every, limit)


def _unpack(package: str, folder: Path) -> None:
    """Download a Debian package and unpack it, unless that was done; NoTextsError if it cannot be had."""
    done = folder / f"{package}.complete"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("apt-get") is None:
        raise NoTextsError(f"{package}: this machine has no apt-get")
    try:
        _run(["apt-get", "download", "-q", package], folder)
        (file,) = islice(sorted(folder.glob(f"{package}_*.deb")), 1)
        _run(["dpkg-deb", "-x", file.name, "."], folder)
    except (subprocess.SubprocessError, ValueError) as error:
        raise NoTextsError(f"{package}: {error}; `apt-get update` may help") from error
    file.unlink()
    done.touch()


def _run(argv: list[str], folder: Path) -> None:
    subprocess.run(argv, cwd=folder, check=True, timeout=FETCH_S, capture_output=True)


def pieces(page: str) -> Iterator[str]:
    """Yield the text of a page of HTML in pieces of a sentence or two, none across two paragraphs."""
    reader = _Paragraphs()
    reader.feed(page)
    for text in reader.found:
        parts = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
        yield from (part for part in parts if len(part) >= PIECE // 4)


class _Paragraphs(HTMLParser):
    """Gathers the text between the tags of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._words: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._silent += tag in _SILENT
        if tag in _BLOCKS:
            self._end()

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in _SILENT and self._silent > 0
        if tag in _BLOCKS:
            self._end()

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._words += data.split()

    def _end(self) -> None:
        if self._words:
            self.found.append(" ".join(self._words))
        self._words = []
