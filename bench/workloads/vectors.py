"""The data sets of the vector rows: three synthetic shapes of known difficulty, and real embeddings of real text."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.int64]]
TEST = 2000
PART = 50_000  # rows made at once
# Characters of one piece of a docstring: a sentence or two.
PIECE = 160


def unit(rows: Any) -> Rows:
    """Return rows of length one."""
    array = np.asarray(rows, dtype=np.float32)
    return np.ascontiguousarray(array / np.linalg.norm(array, axis=1, keepdims=True))


def clustered(count: int, rng: np.random.Generator, dimension: int = 128) -> Rows:
    """Return 1,000 centres with noise of 0.6: easy."""
    centres = rng.standard_normal((1000, dimension))
    chosen = rng.integers(0, 1000, count)
    rows = np.empty((count, dimension), np.float32)
    for at in range(0, count, PART):  # all at once would need four times the memory
        part = centres[chosen[at : at + PART]]
        rows[at : at + PART] = unit(part + 0.6 * rng.standard_normal(part.shape))
    return rows


def latent(count: int, rng: np.random.Generator, dimension: int = 384) -> Rows:
    """Return a 48-dimensional Gaussian in 384 dimensions with 5 % noise: like embeddings."""
    basis = rng.standard_normal((48, dimension)) / np.sqrt(48)
    rows = rng.standard_normal((count, 48)) @ basis
    return unit(rows + 0.05 * rng.standard_normal((count, dimension)))


def gaussian(count: int, rng: np.random.Generator, dimension: int = 64) -> Rows:
    """Return independent normal values: the hardest, nothing is near anything."""
    return unit(rng.standard_normal((count, dimension)))


def docstrings(limit: int) -> list[str]:
    """Return pieces of the standard library's docstrings, as found on every machine, each once."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib"} & set(path.parts):
            continue
        for text in docstrings_of(path):
            found.setdefault(text, None)
            if len(found) >= limit:
                return list(found)
    return list(found)


def docstrings_of(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file in pieces; none of a file that cannot be read."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, OSError):
        return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            parts = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
            yield from (part for part in parts if len(part) >= PIECE // 4)


def real(limit: int, cache: Path) -> Rows:
    """Return the default encoder's embeddings of docstrings; computed once, then read from `cache`."""
    path = cache / f"docstrings-{limit}-{sys.version_info.minor}.npy"
    return embedded(path, partial(docstrings, limit))


def embedded(path: Path, texts: Callable[[], Sequence[str]]) -> Rows:
    """Return the default encoder's embeddings of texts, kept in `path`: computed only if that is not there."""
    if path.exists():
        return unit(np.load(path))
    from tokenizers import Tokenizer  # noqa: PLC0415 - only where the data set is made

    from engine.models.encoders.encoder import Encoder  # noqa: PLC0415

    encoder = Encoder.load("")
    tokenizer = Tokenizer.from_buffer(encoder.tokenizer_json())
    tokenizer.enable_truncation(128)
    asked, rows = texts(), []
    for start in range(0, len(asked), 256):
        tokens = [each.ids for each in tokenizer.encode_batch(asked[start : start + 256])]
        rows.append(encoder.encode(tokens))
        print(f"\r{path.stem}: embedding {start + len(tokens)}/{len(asked)}", end="", flush=True)
    print()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new.npy")
    np.save(fresh, np.concatenate(rows))
    fresh.replace(path)
    return unit(np.load(path))


def nearest(base: Rows, queries: Rows, k: int = 10) -> Ids:
    """Return the true k nearest rows of each query by dot product, best first."""
    found = []
    for start in range(0, len(queries), 200):
        scores = queries[start : start + 200] @ base.T
        best = np.argpartition(-scores, k, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        found.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(found).astype(np.int64)


def recall(found: Any, truth: Ids) -> float:
    """Return recall@10: which share of the true nearest was found."""
    hits = sum(len(set(map(int, f)) & set(map(int, t))) for f, t in zip(found, truth, strict=True))
    return hits / truth.size
