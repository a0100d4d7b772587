"""A graph for walks: rows like Deep's (96 dimensions), made by a seed, with their true nearest, kept in a folder.

The rows' variances fall as 1 / place^1.4 along random axes, so that at a million rows best-first search with 64
candidates has the recall that Jiang's thesis gives for Deep10M. A build that is interrupted goes on where it was saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.workloads.vectors import Ids, Rows, nearest, unit
from services.vector_search.index.native_graph import NativeGraph, kernel, load_graph
from services.vector_search.index.rows import VectorRows

DIMENSION, LINKS = 96, 32  # above the lowest level, which has 63
QUERIES = 1000
FALLS = 0.7  # standard deviations, by place
PIECE, SAVE_S = 20_000, 60


class WalkGraph(NamedTuple):
    """A graph over unit rows, compared by dot product, with queries and the true ten nearest of each."""

    graph: NativeGraph
    rows: VectorRows
    queries: Rows
    truth: Ids


def deep_like(count: int, seed: int) -> Rows:
    """Return unit rows of 96 dimensions, of which the first few axes carry most."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((DIMENSION, DIMENSION)))[0]
    sizes = np.arange(1.0, DIMENSION + 1) ** -FALLS
    drawn = rng.standard_normal((count, DIMENSION), dtype=np.float32)
    return unit(drawn @ (sizes[:, None] * axes.T).astype(np.float32))


def build(base: Rows, threads: int) -> tuple[NativeGraph, VectorRows]:
    """Return a graph over rows that are in memory."""
    rows, labels = VectorRows(DIMENSION, len(base)), np.arange(len(base))
    rows.append(base, labels, labels)
    graph = NativeGraph(rows, "dot", len(base), threads, links=LINKS)
    graph.add(rows.view, labels)
    return graph, rows


def make(count: int, seed: int, folder: Path, begins: Callable[[], bool]) -> WalkGraph | None:
    """Return the graph of so many rows, built or loaded; None without a kernel, or where `begins` left no time."""
    if kernel() is None:
        return None
    drawn = deep_like(count + QUERIES, seed)
    base, queries = drawn[:count], np.ascontiguousarray(drawn[count:])
    rows, labels = VectorRows(DIMENSION, count), np.arange(count)
    rows.append(base, labels, labels)
    place = folder / f"deep-like-{count}-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    graph = _loaded(place / "graph", rows)
    saved_s = time.monotonic()
    while (at := int(graph._arrays.state[2])) < count:
        if not begins():
            _save(graph, place / "graph")
            return None
        graph.add(rows.view, labels[at : at + PIECE])
        if time.monotonic() > saved_s + SAVE_S:
            _save(graph, place / "graph")
            saved_s = time.monotonic()
    truth = place / "nearest.npy"
    if not truth.exists():
        _save(graph, place / "graph")
        np.save(truth, nearest(base, queries))
    graph.threads = 1
    return WalkGraph(graph, rows, queries, np.load(truth))


def lowest(graph: NativeGraph) -> tuple[Ids, int]:
    """Return the lowest level's links, (nodes, most links) with -1 where there is none, and the entry."""
    nodes = int(graph._arrays.state[2])
    near = graph._arrays.near[:nodes].astype(np.int64)
    there = np.arange(near.shape[1] - 1) < near[:, :1]
    return np.where(there, near[:, 1:], -1), int(graph._arrays.state[0])


def _loaded(path: Path, rows: VectorRows) -> NativeGraph:
    if path.exists():
        graph = load_graph(path, DIMENSION, "dot", len(rows.view.live), 2)
        assert isinstance(graph, NativeGraph)
        graph.over(rows)
        return graph
    return NativeGraph(rows, "dot", len(rows.view.live), 2, links=LINKS)


def _save(graph: NativeGraph, path: Path) -> None:
    fresh = path.with_suffix(".new")
    graph.save(str(fresh))
    fresh.replace(path)
