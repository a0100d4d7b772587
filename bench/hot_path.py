"""The code that each row measures: a row is stale once the code of one of these files is not what was measured.

Comments, docstrings and blank lines of Python files are no code: a row stays fresh when only they change.

A path is a file, or a folder with all that is in it; one after "!" is left out again. A request of embeddings passes no
file that is there for chat or search alone, so that a change of such a file says nothing of what was measured.

`python -m bench.hot_path` writes the paths as they are listed now into the published documents, each with the digest of
the tree that was measured, where that is among the latest commits: its own paths have its own digest there.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench import ROOT

_BUS = ("common/bus", "common/redis", "common/wire")
_MESH = (*_BUS, "common/worker", "services/router")
_ENCODER = ("engine/encoder", "engine/models/encoders", "engine/kernels/encoder.cpp")
_EMBED = (*_ENCODER, "engine/device.py", "services/adapters/encode", *_MESH)
_DECODER = ("engine/decoder", "engine/models/decoders", "engine/kernels/decoder")
# Steps of an executor by itself: nothing schedules sequences, and no page goes to another tier.
_STEPS = (
    "engine/decoder/executor", "engine/decoder/sampling", "engine/decoder/kv/passage_store.py",
    "engine/models/decoders", "engine/kernels/decoder",
)  # fmt: skip
_CHAT = (*_DECODER, "engine/device.py", "services/adapters/generate", *_MESH)
_PAGES = ("common/pages", "services/kv_store")
_SEARCH = ("services/vector_search", "common/transport")
_COST = ("common/cost",)
_ALL = (*_CHAT, *_EMBED, *_PAGES, *_SEARCH)


def _but(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"!{folder}/{name}.py" for name in names)


_NO_SEARCH = (
    *_but("services/router", "shard_reads", "text/collections"),
    *_but("services/router/http", "search", "documents", "collections", "collection_map"),
    *_but("services/router/responses", "collection_map", "collection_stats"),
    *_but("services/router/workflows", "search", "candidates", "write", "reembed"),
    *_but("common", "wire/search", "bus/writes"),
)
_NO_CHAT = (
    *_but("services/router/http", "chat", "completions", "generations", "grounded", "responses"),
    *_but("services/router/http", "sessions", "session_pages", "session_turns", "tokenizing"),
    *_but("services/router/responses", "answer_format", "answer_sources", "model_response"),
    *_but("services/router/responses", "tool_calls"),
    *_but("services/router/workflows", "grounded", "interval_retrieval", "retrieve"),
    *_but("services/router/workflows", "session_history"),
    *_but("services/router/text", "chats", "completions", "generation_bodies", "generations"),
    *_but("services/router/text", "grounded", "intervals", "passages", "pool", "quotes"),
    *_but("services/router/text", "response_format", "responses", "rewrites", "templates"),
    *_but("services/router/text", "tokenizing", "tools"),
    *_but("services/router", "mesh/planned_costs"),
    *_but("common", "bus/control", "wire/control", "wire/retrievals", "wire/sessions"),
)
_NO_HOMES = _but("engine/decoder/offload", "homes", "probes")
_TEXTS = (*_EMBED, *_NO_SEARCH, *_NO_CHAT)
_JOBS = (*_MESH, *_NO_SEARCH, *_NO_CHAT)
_TALK = (*_CHAT, *_NO_SEARCH)
_TURNS = (*_TALK, *_PAGES)
# Searches go straight to a process and writes through a stream of their own: neither is leased.
_VECTORS = (*_SEARCH, *_MESH, *_NO_CHAT, *_but("common/worker", "lease_reader"))
# A search lists and stores no documents.
_SEARCHES = (*_VECTORS, *_but("services/router/http", "documents"))
_INDEX = "services/vector_search/index"
_SELECTION = tuple(
    f"{_INDEX}/{name}" for name in ("selection.py", "native/selection.cpp", "native/selection.h")
)
_SCHEDULES = tuple(
    f"planner/{name}.py"
    for name in ("rag_schema", "inventory", "stage_profile", "schedule_search", "execution")
)

PATHS: dict[str, tuple[str, ...]] = {
    "E1": _TEXTS, "E2": _TEXTS, "R1": _JOBS, "R2": _BUS, "V1": _SEARCHES, "V1W": _VECTORS, "V1M": _VECTORS,
    "V1L": ("services/vector_search/index",),
    "V6": _VECTORS, "V2": _VECTORS, "V3": ("services/vector_search/index",), "V4": _SELECTION,
    "V4R": ("planner/disaggregation.py", "planner/scale_out.py"), "G2": _SCHEDULES,
    "G2M": ("planner/load_simulation.py", *_TALK),
    "V5": ("services/vector_search/index", "services/vector_search/tuning"),
    "G1P": ("engine/models/retro", "models/retro"),
    "G1Q": (*_DECODER, "models/demo", "models/retro", "services/router/text/passages.py"),
    "F1": (*_EMBED, *_SEARCH, *_NO_CHAT), "F2": _TEXTS, "F3": (*_EMBED, *_DECODER, *_SEARCH), "F4": _TEXTS,
    "F5": _ALL, "F5P": _TURNS,
    "C1": _TALK, "R1C": _TALK, "F1C": _TALK, "F1A": _ALL, "F1P": _TURNS, "F2C": _TALK, "F4C": _TALK,
    "Q1": (*_CHAT, *_SEARCH), "Q2": (*_CHAT, *_EMBED, *_SEARCH, "bench/ranker"),
    "X1": _STEPS, "L1": _STEPS, "L2": _STEPS, "L3": _STEPS,
    "L4": ("engine/kernels/decoder",), "L5": _STEPS, "L6": _STEPS, "K1": ("engine/kernels/decoder",),
    "N1": _DECODER, "N1S": ("engine/decoder/offload", *_NO_HOMES, *_COST),
    "N2": (*_DECODER, *_COST), "H1": _TALK, "H2": _ALL, "T1": _TALK, "P1": _TURNS, "P2": _TURNS, "P3": _TURNS,
    "P4": (*_DECODER, *_PAGES), "P5": ("engine/decoder/kv/eviction",), "X2": _STEPS, "W1": (*_COST, *_TEXTS),
    "W2": (*_COST, *_TEXTS), "W3": (*_COST, *_TEXTS), "F6": ("services/router",),
    "F1R": (*_CHAT, *_EMBED, *_SEARCH),
    "G1": (*_CHAT, *_EMBED, *_SEARCH, "engine/models/retro"), "G1S": ("planner/pipelined_retrieval.py",),
    "G3": ("planner/iterative_batches.py", *_DECODER),
}  # fmt: skip
_CODE = {".py", ".h", ".cpp", ".lua"}
COMMITS = 60


def hot_path(row: str) -> dict[str, Any]:
    """Return the paths of a row and the digest of their code now, as a document keeps them."""
    paths = sorted(set(PATHS[row]))
    return {"paths": paths, "digest": digest(paths)}


def digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """Return a digest of the names and the code of all code files under these paths, sorted."""
    found, given = hashlib.blake2b(digest_size=16), list(paths)
    out = [root / path[1:] for path in given if path.startswith("!")]
    for path in given:
        place = root / path
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            left_out = any(file == each or each in file.parents for each in out)
            if file.suffix in _CODE and not left_out:
                found.update(f"{file.relative_to(root)}\n".encode() + _code(file) + b"\0")
    return found.hexdigest()


def _code(file: Path) -> bytes:
    """Return a file without what no program does; files of other languages than Python as they are."""
    text = file.read_bytes()
    return python_code(text.decode()).encode() if file.suffix == ".py" else text


@functools.cache  # dozens of rows name the same files
def python_code(text: str) -> str:
    """Return the lines of a Python module without comments, docstrings and blank lines.

    The result is the same under every version of Python that reads the module: its parser tells places alone.
    SyntaxError for a text that is no Python.
    """
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
                and not lines[first.lineno - 1][: first.col_offset].strip()
            ):
                assert first.end_lineno is not None
                for row in range(first.lineno - 1, first.end_lineno):
                    lines[row] = ""
    return "\n".join(kept for line in lines if (kept := line.rstrip()))


def stale(document: Mapping[str, Any], root: Path = ROOT) -> bool:
    """True if the code that a document measured has changed since, or if the document does not name the code."""
    kept = document.get("hot_path")
    return kept is None or digest(kept["paths"], root) != kept["digest"]


def narrowed(document: Mapping[str, Any], then: Path) -> dict[str, Any] | None:
    """Return a row's paths as they are listed now, with their digest in the tree that a document measured.

    None unless the tree `then` is that one: the document's own paths have the document's own digest there.
    """
    kept, row = document.get("hot_path"), document["id"]
    if kept is None or row not in PATHS or digest(kept["paths"], then) != kept["digest"]:
        return None
    paths = sorted(set(PATHS[row]))
    return {"paths": paths, "digest": digest(paths, then)}


def main() -> int:
    """Rewrite the paths of the published documents whose tree is among the latest commits; say which."""
    from bench.document import RESULTS, save  # noqa: PLC0415 - it needs this module

    left = {path: msgspec.json.decode(path.read_bytes()) for path in sorted(RESULTS.glob("*.json"))}
    for commit in _git("rev-list", "-n", str(COMMITS), "HEAD").decode().split():
        with tempfile.TemporaryDirectory(prefix="spillway-hot-path-") as folder:
            tree = _git("archive", commit, "--", "common", "engine", "planner", "services")
            with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
                archive.extractall(folder, filter="data")
            for path, found in list(left.items()):
                fresh = narrowed(found, Path(folder))
                if fresh is not None:
                    before, found["hot_path"] = stale(found), fresh
                    save(path, found)
                    print(f"{path.name}: by {commit[:12]}; stale {before}, now {stale(found)}")
                    del left[path]
    print(f"{len(left)} are of older trees, and as they were")
    return 0


def _git(*argv: str) -> bytes:
    return subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, check=True).stdout  # noqa: S607


if __name__ == "__main__":
    sys.exit(main())
