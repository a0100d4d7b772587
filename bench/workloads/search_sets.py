"""The data sets of V1 and V2 over HTTP: rows with a number to filter by, queries to tune with, and queries to measure.

A set is made once by its seed and lies in a directory as arrays, where servers of rivals read it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.workloads import texts, vectors
from bench.workloads.vectors import TEST, Ids, Rows

TUNING = 500  # queries by which rivals' settings are chosen, and which nobody measures
BUCKETS = 1000  # every row has numbers below this: a filter takes those below a bound
BOUNDS = (None, 100, 10)  # all rows, a tenth, a hundredth
K = 10
LARGEST = 500_000  # rows; of more there are fewer builds of an index, since each takes minutes


class SetShape(NamedTuple):
    """A data set's name, size and source."""

    name: str
    rows: int
    dimension: int
    source: str


SMALL = SetShape("clustered", 50_000, 128, "clustered")
CLUSTERED = SetShape("clustered", 200_000, 128, "clustered")
LATENT = SetShape("latent-48", 200_000, 128, "latent")
DOCSTRINGS = SetShape("docstrings of installed packages", 50_000, 384, "docstrings")
MANUALS = SetShape("manuals of Python, PostgreSQL and Linux", 50_000, 384, "manuals")
MILLION = SetShape("latent-48", 1_000_000, 96, "latent")
GAUSSIAN = SetShape("gaussian", 50_000, 64, "gaussian")  # nothing is near anything
LARGE = SetShape("clustered", 1_100_000, 1024, "clustered")  # 4.5 GB of rows
QUICK = SetShape("clustered", 12_000, 128, "clustered")


@dataclass(frozen=True, slots=True)
class SearchSet:
    """Unit rows and their buckets, which are random, unit queries of the same source, and the true nearest by bound."""

    shape: SetShape
    folder: Path
    base: Rows
    buckets: np.ndarray[Any, np.dtype[np.int64]]
    tuning: Rows
    queries: Rows
    truths: dict[int | None, Ids]

    @property
    def places(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return each row's number along the first coordinate: rows of a filter by it lie together."""
        order = np.argsort(np.argsort(self.base[:, 0]))
        found: np.ndarray[Any, np.dtype[np.int64]] = order * BUCKETS // len(order)
        return found

    @property
    def name(self) -> str:
        """Return the set's name with its size."""
        return name_of(self.shape)

    def truth(self, bound: int | None, *, tuning: bool = False) -> Ids:
        """Return the true nearest of the queries to measure, or of those to tune with."""
        found = self.truths[bound]
        return found[:TUNING] if tuning else found[TUNING:]


def name_of(shape: SetShape) -> str:
    """Return a shape in words."""
    return f"{shape.name}, {shape.rows // 1000}k x {shape.dimension}"


def search_set(shape: SetShape, seed: int, cache: Path) -> SearchSet:
    """Return a data set, made if `cache` does not hold it; NoTextsError if its texts cannot be had."""
    folder = cache / f"{shape.source}-{shape.rows}x{shape.dimension}-{seed}"
    if not (folder / "complete").exists():
        _make(shape, seed, cache, folder)

    def read(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r" if name == "base" else None)

    queries = read("queries")
    truths = {bound: read(f"truth-{bound}") for bound in BOUNDS}
    return SearchSet(
        shape, folder, read("base"), read("buckets"), queries[:TUNING], queries[TUNING:], truths
    )


def _make(shape: SetShape, seed: int, cache: Path, folder: Path) -> None:
    rng = np.random.default_rng(seed)
    count = shape.rows + TUNING + TEST
    rows = _source(shape, count, seed, cache, rng)
    order = rng.permutation(len(rows))
    queries, base = rows[order[: TUNING + TEST]], rows[order[TUNING + TEST :]]
    buckets = rng.integers(0, BUCKETS, len(base))
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"base": base, "buckets": buckets, "queries": queries}
    for bound in BOUNDS:
        arrays[f"truth-{bound}"] = nearest_below(base, buckets, queries, bound)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "complete").touch()


def nearest_below(base: Rows, buckets: Any, queries: Rows, bound: int | None) -> Ids:
    """Return the true nearest of each query among the rows whose bucket is below a bound."""
    if bound is None:
        return vectors.nearest(base, queries, K)
    allowed = np.flatnonzero(buckets < bound)
    found: Ids = allowed[vectors.nearest(base[allowed], queries, min(K, len(allowed) - 1))]
    return found


def _source(shape: SetShape, count: int, seed: int, cache: Path, rng: np.random.Generator) -> Rows:
    if shape.source == "clustered":
        return vectors.clustered(count, rng, shape.dimension)
    if shape.source == "latent":
        return vectors.latent(count, rng, shape.dimension)
    if shape.source == "gaussian":
        return vectors.gaussian(count, rng, shape.dimension)
    drawn: dict[str, Callable[[], list[str]]] = {
        "docstrings": partial(texts.package_docstrings, count, seed),
        "manuals": partial(texts.manuals, count, cache / "debian", seed),
    }
    return vectors.embedded(cache / f"{shape.source}-{count}-{seed}.npy", drawn[shape.source])
