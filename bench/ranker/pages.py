"""Texts to train a cross-encoder on: docstrings and readmes of installed packages, in windows of a passage's length.

Nothing is taken of the sample collection `docs`, about which row Q2 asks: neither the standard library, nor a text of
a package that begins as one of its documents does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cli import sample

PACKAGES = (
    "aiohttp", "anyio", "attrs", "chardet", "charset-normalizer", "click", "cryptography", "cycler", "fonttools",
    "fsspec", "graphql-core", "huggingface_hub", "hypothesis", "Jinja2", "joblib", "jsonschema", "lxml",
    "markdown-it-py", "matplotlib", "msgspec", "multidict", "mypy", "narwhals", "networkx", "numpy", "openai",
    "packaging", "pathspec", "pillow", "pip", "playwright", "prometheus_client", "psutil", "pydantic", "Pygments",
    "pyparsing", "pypdfium2", "pytest", "python-dateutil", "python-docx", "python-pptx", "PyYAML", "redis",
    "referencing", "regex", "reportlab", "requests", "rich", "schemathesis", "scikit-learn", "scipy",
    "sentence-transformers", "setuptools", "sortedcontainers", "structlog", "sympy", "tokenizers", "torch", "tqdm",
    "transformers", "typer", "urllib3", "valkey", "Werkzeug", "xlsxwriter", "yarl",
)  # fmt: skip
WINDOW_CHARS = 480
WINDOWS = 3  # of one page at most
_MOST = 240  # pages of one package, so that no subject fills the whole
_MIN_CHARS, _BEGINNING = 80, 60
_LEFT_OUT = frozenset({"tests", "test", "testing", "_vendor", "_vendored", "vendor", "externals"})
_HEADING = re.compile(r"^#{1,4} +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TextPage:
    """A docstring or a readme's section, under its dotted name or its heading."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a page as a passage holds it: the page's first one begins with the name."""

    page: int
    text: str


def begins(text: str) -> str:
    """Return the beginning of a text without its spaces, by which copies of a text are known."""
    return "".join(text.lower().split())[:_BEGINNING]


def pages(known: Collection[str], packages: Iterable[str] = PACKAGES) -> list[TextPage]:
    """Return the pages of the packages that are installed, without those that begin like one of `known`."""
    seen, found = set(known), list[TextPage]()
    for package in packages:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        fresh = []
        for page in (*_readme(distribution), *_docstrings(distribution)):
            beginning = begins(page.text)
            if len(page.text) >= _MIN_CHARS and beginning not in seen:
                seen.add(beginning)
                fresh.append(page)
        # Neighbours in a package stay together: they are what one page is mistaken for.
        found += fresh[:_MOST]
    return found


def windows(number: int, page: TextPage) -> list[Window]:
    """Return a page's first windows of at most WINDOW_CHARS characters, cut between lines where lines are short."""
    rest, found = f"{page.name}\n\n{page.text}", list[Window]()
    while rest and len(found) < WINDOWS:
        cut = len(rest)
        if cut > WINDOW_CHARS:
            cut = max(
                rest.rfind("\n", WINDOW_CHARS // 2, WINDOW_CHARS),
                rest.rfind(" ", 0, WINDOW_CHARS) // 2,
            )
            cut = cut if cut > 0 else WINDOW_CHARS
        found.append(Window(number, rest[:cut].strip()))
        rest = rest[cut:].strip()
    return [window for window in found if len(window.text) >= _MIN_CHARS]


def sections(name: str, text: str) -> Iterator[TextPage]:
    """Yield the sections of a Markdown text, each under the text's name and its own heading."""
    _, *parts = _HEADING.split(text)
    for heading, content in zip(parts[::2], parts[1::2], strict=True):
        yield TextPage(f"{name}: {heading}", content.strip())


def docstrings(tree: ast.Module, name: str) -> Iterator[TextPage]:
    """Yield the docstrings of a module and of all that is public in it."""
    return (TextPage(*told) for told in sample.docstrings(tree, name))


def _readme(distribution: metadata.Distribution) -> Iterator[TextPage]:
    told: Any = distribution.metadata  # a message, whose body is the readme
    text = told.get_payload()
    if isinstance(text, str):
        yield from sections(told["Name"], text)


def _docstrings(distribution: metadata.Distribution) -> Iterator[TextPage]:
    files = sorted(str(file) for file in distribution.files or () if str(file).endswith(".py"))
    for file in _spread(files):
        parts = Path(file).with_suffix("").parts
        if _LEFT_OUT.intersection(parts) or ".." in parts:
            continue
        try:
            source = Path(str(distribution.locate_file(file))).read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        yield from docstrings(tree, ".".join(p.lstrip("_") for p in parts if p != "__init__"))


def _spread(files: list[str], most: int = 120) -> list[str]:
    """Return at most so many files, spread evenly over all of them."""
    step = max(1, len(files) // most)
    return files[::step]
