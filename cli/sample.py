"""The sample collections: `docs` (the project's documentation, Python's docstrings) and `handbook` (cli/handbook.py).

The texts of `docs` are on every machine with Python, so that a first search has useful answers; `handbook` has the
pages about which the shipped chat model answers.
"""

from __future__ import annotations

import ast
import asyncio
import heapq
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spillway_client import AsyncSpillway

from cli import handbook
from cli.files import Found, Item, Root
from cli.ingest import ensure
from cli.upload import Counts, Stop, Upload

COLLECTION = "docs"
SOURCE = "spillway-sample"
MAX_DOCUMENTS = 1500
SAY_EVERY_S = 3.0
_MIN_CHARS, _MAX_CHARS = 60, 1200
_PROJECT = Path(__file__).resolve().parent.parent
_LEFT_OUT = frozenset(
    {
        "antigravity", "ensurepip", "idlelib", "lib2to3", "msilib", "pydoc_data", "test", "this", "turtledemo", "tests",
        "pickletools", "tix", "crypt",
        "distutils", "encodings", "site-packages", "__pycache__",
    }
)  # fmt: skip
_BUILTIN = ("builtins", "math", "itertools", "time", "zlib")


def documents() -> Iterator[Found]:
    """Yield the project's documentation, then the most useful docstrings, in a stable order."""
    yield from project()
    yield from standard_library(MAX_DOCUMENTS)


def project() -> Iterator[Found]:
    """Yield README and docs, if the project's files are present."""
    if (_PROJECT / "README.md").is_file():
        yield from Root(_PROJECT / "README.md", SOURCE).documents()
    if (_PROJECT / "docs").is_dir():
        yield from Root(_PROJECT / "docs", SOURCE, globs=("*.md",)).documents()


def standard_library(limit: int) -> Iterator[Item]:
    """Yield the `limit` most useful docstrings of public names, as `python/<qualified name>`."""
    named = {**dict(_from_sources()), **dict(_from_builtins())}
    best = heapq.nlargest(limit, named.items(), key=lambda entry: (_use(*entry), entry[0]))
    for name, text in sorted(best):
        metadata = {"source": SOURCE, "path": f"python/{name}", "title": name, "size": len(text)}
        yield Item(f"python/{name}", f"{name}\n\n{text}", metadata)


def _use(name: str, text: str) -> float:
    """Return a docstring's usefulness: its length, up to a paragraph or two, less for names deep within modules."""
    return min(len(text), 600) / 600 - 0.35 * name.count(".")


def _from_sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    lifted: dict[str, frozenset[str]] = {}
    for path in sorted(root.rglob("*.py"), key=lambda p: (p.parent, p.name != "__init__.py", p)):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        if _LEFT_OUT.intersection(parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        if parts[-1] == "__init__":
            lifted |= _lifted(tree, module)
        names = lifted.get(module, frozenset())
        useful = (found for name, text in docstrings(tree, module) for found in _useful(name, text))
        for name, text in useful:
            top = name.removeprefix(f"{module}.").split(".")[0]
            package = module.rpartition(".")[0]
            public = top in names or "*" in names
            yield (package + name.removeprefix(module) if public and name != module else name), text


def _lifted(tree: ast.Module, package: str) -> dict[str, frozenset[str]]:
    """Return by submodule the names that its package exports as its own (asyncio.tasks.wait_for)."""
    return {
        f"{package}.{node.module}": frozenset(alias.name for alias in node.names)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }


def docstrings(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of a module or class and of all that is public in it."""
    if told := ast.get_docstring(node):
        yield name, told
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from docstrings(child, f"{name}.{child.name}")
        elif told := ast.get_docstring(child):
            yield f"{name}.{child.name}", told


def _from_builtins() -> Iterator[tuple[str, str]]:
    for module_name in _BUILTIN:
        module = sys.modules.get(module_name)
        if module is None:
            continue
        for name, value in sorted(vars(module).items()):
            own = getattr(value, "__module__", module_name) == module_name
            if own and not name.startswith("_") and callable(value):
                yield from _useful(f"{module_name}.{name}", value.__doc__)
                if isinstance(value, type) and not issubclass(value, BaseException):
                    for method, function in sorted(vars(value).items()):
                        if not method.startswith("_"):
                            yield from _useful(f"{module_name}.{name}.{method}", function.__doc__)


def _useful(name: str, text: object) -> Iterator[tuple[str, str]]:
    if isinstance(text, str) and len(text.strip()) >= _MIN_CHARS:
        stripped = text.strip()
        cut = stripped[:_MAX_CHARS].rsplit("\n", 1)[0] if len(stripped) > _MAX_CHARS else stripped
        yield name, cut


async def load(
    url: str,
    progress: Callable[[str], None] | None = None,
    *,
    api_key: str | None = None,
    data_dir: Path | None = None,
) -> int:
    """Load the samples, skip documents stored already, and return the number of documents stored now.

    `handbook` is written below `data_dir` and comes first, since it is small; without `data_dir` only `docs` is loaded.
    `progress` gets a sentence every few seconds. Raises spillway_client.SpillwayError, and Stop if the server is away.
    """
    async with AsyncSpillway(url, api_key, max_retries=20) as client:
        pages: list[Item] = []
        if data_dir is not None:
            pages = await asyncio.to_thread(handbook.documents, handbook.directory(data_dir))
        known = 0
        if pages:
            known = await _load(client, handbook.COLLECTION, handbook.SOURCE, pages, progress)
        found = await asyncio.to_thread(
            lambda: [item for item in documents() if isinstance(item, Item)]
        )
        return known + await _load(client, COLLECTION, SOURCE, found, progress)


async def _load(
    client: AsyncSpillway,
    collection: str,
    source: str,
    found: Sequence[Found],
    progress: Callable[[str], None] | None,
) -> int:
    counts, said_at = Counts(), time.monotonic()

    def notice(now: Counts, problem: object) -> None:
        nonlocal said_at
        done = now.stored + now.unchanged
        if progress is None or problem is not None or done == 0:
            return
        if done == len(found) or time.monotonic() - said_at >= SAY_EVERY_S:
            said_at = time.monotonic()
            progress(f"{done} of {len(found)} documents in `{collection}`")

    await ensure(client, collection)
    upload = Upload(client, collection, source, counts=counts, notice=notice, patience_s=120.0)
    await upload.run(iter(found), prune=lambda _: True)
    return counts.stored + counts.unchanged


__all__ = ["COLLECTION", "Stop", "documents", "load"]
