"""hnswlib, faiss, usearch or svs in a process of its own, fed by lines of JSON: runs in the library's environment.

`python vector_library.py build LIBRARY BUILD ROWS INDEX` indexes the rows of the directory ROWS;
`python vector_library.py serve LIBRARY ROWS INDEXES` answers {"use": {"setting"}}, {"search": {"start", "count",
"per"}} with {"seconds"}, and {"recall": {"start", "count"}} with {"recall", "seconds"}, of the directory's queries.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Words = Mapping[str, Any]
Search = Callable[[Any], Any]
K = 10
BATCH = 256
THREADS = 2  # what builds, and what recall is told with
HNSWLIB, FAISS, USEARCH, SVS = "hnswlib", "faiss", "usearch", "svs"
EFS = (
    10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768,
    1024,
)  # fmt: skip
PROBES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RESCORED = (2, 4, 8, 16)  # times k are scored exactly
_EF, _FEW_EXACT = {"ef": EFS}, {"rescored": (2,), "ef": EFS}
_LISTS = {"rescored": RESCORED, "probes": PROBES}
# By library and build: what it is made with, and the values of its ladders, of which the last name's rise.
BUILDS: dict[str, dict[str, tuple[Words, Words]]] = {
    HNSWLIB: {f"m{links}": ({"M": links, "ef_construction": 200}, _EF) for links in (16, 24, 32)},
    FAISS: {
        "hnsw16": ({"factory": "HNSW16,Flat"}, _EF),
        "hnsw32": ({"factory": "HNSW32,Flat"}, _EF),
        "hnsw32-sq8": ({"factory": "HNSW32_SQ8,RFlat"}, _FEW_EXACT),
        "ivf-pq": ({"factory": "IVF{lists},PQ{half}x4fs,RFlat"}, _LISTS),
    },
    USEARCH: {
        f"{kind}-m{links}": ({"dtype": kind, "connectivity": links, "expansion_add": 200}, _EF)
        for kind in ("f32", "bf16", "i8")
        for links in (16, 32)
    },
    # Its LVQ and LeanVec run on Intel's processors only.
    SVS: {
        f"{kind}-r{links}": ({"dtype": kind, "graph_max_degree": links, "window_size": 200}, _EF)
        for kind in ("float32", "float16")
        for links in (32, 64)
    },
}


class Library(Protocol):
    """A library that finds the nearest of each query by inner product."""

    def build(self, rows: Any, made_with: Words, path: Path) -> None:
        """Index rows and write the index."""

    def open(self, made_with: Words, dimension: int, path: Path) -> None:
        """Read an index in place of the one before."""

    def use(self, setting: Words) -> None:
        """Search with a setting from now on."""

    def search(self, queries: Any) -> Any:
        """Return the nearest rows of each query."""


class Hnswlib:
    """hnswlib's graph."""

    def __init__(self) -> None:
        self._index: Any = None
        self._threads = THREADS

    def build(self, rows: Any, made_with: Words, path: Path) -> None:
        """Index rows and write the index."""
        import hnswlib  # noqa: PLC0415 - in its environment only

        index = hnswlib.Index("ip", rows.shape[1])
        index.init_index(len(rows), **made_with)
        index.add_items(rows, np.arange(len(rows)), num_threads=THREADS)
        index.save_index(str(path))

    def open(self, made_with: Words, dimension: int, path: Path) -> None:  # noqa: ARG002
        """Read an index in place of the one before."""
        import hnswlib  # noqa: PLC0415

        self._index = hnswlib.Index("ip", dimension)
        self._index.load_index(str(path))

    def use(self, setting: Words) -> None:
        """Search with a setting from now on."""
        self._index.set_ef(setting["ef"])
        self._threads = setting["threads"]

    def search(self, queries: Any) -> Any:
        """Return the nearest rows of each query."""
        return self._index.knn_query(queries, K, num_threads=self._threads)[0]


class Faiss:
    """Whatever faiss' factory makes, inside rows that score the best exactly where its name ends with RFlat."""

    def __init__(self) -> None:
        self._index: Any = None
        self._owner: Any = None  # frees it

    def build(self, rows: Any, made_with: Words, path: Path) -> None:
        """Index rows and write the index."""
        import faiss  # noqa: PLC0415

        count, dimension = rows.shape
        lists = 1 << round(np.log2(4 * count**0.5))
        name = made_with["factory"].format(lists=lists, half=dimension // 2)
        index: Any = faiss.index_factory(dimension, name, faiss.METRIC_INNER_PRODUCT)
        inner: Any = faiss.downcast_index(index.base_index) if "RFlat" in name else index
        if name.startswith("HNSW"):
            inner.hnsw.efConstruction = 200
        index.train(rows)
        index.add(rows)
        faiss.write_index(index, str(path))

    def open(self, made_with: Words, dimension: int, path: Path) -> None:  # noqa: ARG002
        """Read an index in place of the one before."""
        import faiss  # noqa: PLC0415

        self._index = self._owner = None
        self._owner = faiss.read_index(str(path))
        self._index = faiss.downcast_index(self._owner)

    def use(self, setting: Words) -> None:
        """Search with a setting from now on."""
        import faiss  # noqa: PLC0415

        faiss.omp_set_num_threads(setting["threads"])
        inner = self._index
        if "rescored" in setting:
            self._index.k_factor = setting["rescored"]
            inner = faiss.downcast_index(self._index.base_index)
        if "probes" in setting:
            inner.nprobe = setting["probes"]
        else:
            inner.hnsw.efSearch = setting["ef"]

    def search(self, queries: Any) -> Any:
        """Return the nearest rows of each query."""
        return self._index.search(queries, K)[1]


class Usearch:
    """usearch's graph over numbers of one kind."""

    def __init__(self) -> None:
        self._index: Any = None
        self._threads = THREADS

    def _empty(self, made_with: Words, dimension: int) -> Any:
        from usearch.index import Index  # type: ignore[import-not-found]  # noqa: PLC0415

        return Index(ndim=dimension, metric="ip", **made_with)

    def build(self, rows: Any, made_with: Words, path: Path) -> None:
        """Index rows and write the index."""
        index = self._empty(made_with, rows.shape[1])
        index.add(np.arange(len(rows)), rows, threads=THREADS)
        index.save(str(path))

    def open(self, made_with: Words, dimension: int, path: Path) -> None:
        """Read an index in place of the one before."""
        self._index = self._empty(made_with, dimension)
        self._index.load(str(path))

    def use(self, setting: Words) -> None:
        """Search with a setting from now on."""
        self._index.expansion_search = setting["ef"]
        self._threads = setting["threads"]

    def search(self, queries: Any) -> Any:
        """Return the nearest rows of each query."""
        one = queries[0] if len(queries) == 1 else queries
        return self._index.search(one, K, threads=self._threads).keys


class Svs:
    """svs' Vamana graph over numbers of one kind; an index is a directory."""

    PARTS = ("config", "graph", "data")

    def __init__(self) -> None:
        self._index: Any = None

    def build(self, rows: Any, made_with: Words, path: Path) -> None:
        """Index rows and write the index."""
        import svs  # type: ignore[import-not-found]  # noqa: PLC0415

        graph = {name: each for name, each in made_with.items() if name != "dtype"}
        parameters = svs.VamanaBuildParameters(alpha=0.95, **graph)  # its own for inner products
        index = svs.Vamana.build(
            parameters, rows.astype(made_with["dtype"]), svs.DistanceType.MIP, num_threads=THREADS
        )
        path.mkdir(exist_ok=True)
        index.save(*(str(path / part) for part in self.PARTS))

    def open(self, made_with: Words, dimension: int, path: Path) -> None:
        """Read an index in place of the one before."""
        import svs  # noqa: PLC0415

        config, graph, data = (str(path / part) for part in self.PARTS)
        kind = getattr(svs.DataType, made_with["dtype"])
        loader = svs.VectorDataLoader(data, kind, dims=dimension)
        self._index = None
        self._index = svs.Vamana(config, svs.GraphLoader(graph), loader, svs.DistanceType.MIP)

    def use(self, setting: Words) -> None:
        """Search with a setting from now on."""
        self._index.search_window_size = setting["ef"]
        if self._index.num_threads != setting["threads"]:
            self._index.num_threads = setting["threads"]

    def search(self, queries: Any) -> Any:
        """Return the nearest rows of each query."""
        return self._index.search(queries, K)[0]


LIBRARIES: dict[str, Callable[[], Library]] = {
    HNSWLIB: Hnswlib, FAISS: Faiss, USEARCH: Usearch, SVS: Svs,
}  # fmt: skip


def ladders(library: str, builds: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return the settings to try of some builds: each ladder's are slower and more exact from one to the next."""
    found = []
    for build in builds:
        *fixed, (rising, values) = BUILDS[library][build][1].items()
        each: list[dict[str, Any]] = [{"build": build}]
        for name, some in fixed:
            each = [{**setting, name: value} for setting in each for value in some]
        found += [[{**setting, rising: value} for value in values] for setting in each]
    return found


def search_s(search: Search, queries: Any, per: int) -> float:
    """Return the seconds of searches for so many queries at once, after a part of them that nobody times."""
    calls = [queries[at : at + per] for at in range(0, len(queries), per)]
    for call in calls[: len(calls) // 4 + 1]:
        search(call)
    began = time.perf_counter()
    for call in calls:
        search(call)
    return time.perf_counter() - began


def recall_of(search: Search, queries: Any, truth: Any) -> float:
    """Return which share of the true nearest is found."""
    parts = range(0, len(queries), BATCH)
    found = np.concatenate([np.asarray(search(queries[at : at + BATCH])) for at in parts])
    hits = (truth[:, :, None] == found[:, None, :].astype(np.int64)).any(axis=2)
    return float(hits.mean())


def build(library: str, name: str, rows: Path, path: Path) -> None:
    """Write a build's index of the rows."""
    base = np.load(rows / "base.npy")
    LIBRARIES[library]().build(base, BUILDS[library][name][0], path)


class _Served:
    """A library with the indexes of one data set, which answers by line."""

    def __init__(self, library: str, rows: Path, indexes: Path) -> None:
        self._library, self._builds, self._indexes = LIBRARIES[library](), BUILDS[library], indexes
        self._queries, self._truth = np.load(rows / "queries.npy"), np.load(rows / "truth-None.npy")
        self._open = ""

    def use(self, setting: Words) -> dict[str, float]:
        """Open the setting's index, unless that is open, and search with the setting."""
        began, name = time.perf_counter(), setting["build"]
        if name != self._open:
            made_with, dimension = self._builds[name][0], self._queries.shape[1]
            self._library.open(made_with, dimension, self._indexes / name)
            self._open = name
        self._library.use(setting)
        return {"seconds": time.perf_counter() - began}

    def search(self, start: int, count: int, per: int) -> dict[str, float]:
        """Search and tell the seconds."""
        queries = self._queries[start : start + count]
        return {"seconds": search_s(self._library.search, queries, per)}

    def recall(self, start: int, count: int) -> dict[str, float]:
        """Search and tell the recall."""
        began, part = time.perf_counter(), slice(start, start + count)
        recall = recall_of(self._library.search, self._queries[part], self._truth[part])
        return {"recall": recall, "seconds": time.perf_counter() - began}


def serve(library: str, rows: Path, indexes: Path) -> None:
    """Answer lines until there are no more."""
    began = time.perf_counter()
    served = _Served(library, rows, indexes)
    print(json.dumps({"started_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        ((what, work),) = json.loads(line).items()
        print(json.dumps(getattr(served, what)(**work)), flush=True)


def main(argv: Sequence[str]) -> None:
    """Build or serve, as the command line says."""
    what, library, *more = argv
    if what == "build":
        build(library, more[0], Path(more[1]), Path(more[2]))
    else:
        serve(library, Path(more[0]), Path(more[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
