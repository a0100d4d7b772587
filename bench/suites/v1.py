"""V1: the vector index against raw hnswlib at equal recall, in process and through the mesh."""

from __future__ import annotations

import asyncio
import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np

from bench.document import BenchOptions, Body, Rival
from bench.pairs import Blocks, measure_pairs
from bench.suites import v1_mesh
from bench.workloads import vectors
from bench.workloads.vectors import DataSet, Rows
from loadgen import stats
from services.vector_search.index import search_path
from services.vector_search.index.index import Index

K = 10
RECALL = 0.95
THREADS = 2
BATCH = 256
SINGLES = 100
EF = search_path.EF_LADDER
# hnswlib's own: links per row and candidates while building.
BUILDS = ((16, 200), (24, 200))


def run(options: BenchOptions) -> Body:
    """Measure all data sets in process, then one through the mesh."""
    body = Body()
    rival = Rival("hnswlib", importlib.metadata.version("hnswlib"))
    body.rivals.append(rival)
    rows, ratios, recalls = [], {}, []
    built: list[tuple[Index, DataSet]] = []
    for made in data_sets(options):
        cells, ratio, index = _compare(made, options, rival, body)
        rows += cells
        ratios[made.name] = ratio
        recalls.append(vectors.recall(index.search(made.queries, K).labels, made.truth))
        built.append((index, made))
    columns = ["data", "rows x dim", "recall ours / theirs", "ef ours / theirs", "queries"]
    columns += ["ours per s", "hnswlib per s", "ratio [95 %]", "pairs (blocks dropped)"]
    body.table("(a) in process, recall@10 on 2,000 held-out queries", columns, rows)
    low = min(ratios.values(), key=lambda found: found["value"])
    body.met["(a) worst ratio"] = stats.verdict(low, 1.5, 1.0)
    body.met["(a) recall@10 ≥ 0.95"] = "goal" if min(recalls) >= RECALL else "missed"
    rival.measured = True
    with tempfile.TemporaryDirectory(prefix="spillway-v1-") as folder:
        asyncio.run(v1_mesh.run(body, options, built, Path(folder)))
    return body


def data_sets(options: BenchOptions) -> Iterator[DataSet]:
    """Yield the four data sets, fixed by the seed."""
    count = options.pick(50_000, 12_000) + vectors.TEST
    rng = np.random.default_rng(options.seed)
    yield vectors.split("clustered", vectors.clustered(count, rng), rng)
    if options.quick:
        return
    yield vectors.split("latent-48", vectors.latent(count, rng), rng)
    yield vectors.split("gaussian", vectors.gaussian(count, rng), rng)
    cache = options.setup_dir / "data"
    yield vectors.split("docstrings", vectors.real(20_000, cache), rng)


def _compare(
    data: DataSet, options: BenchOptions, rival: Rival, body: Body
) -> tuple[list[list[str]], dict[str, Any], Index]:
    ours = build(data.base)
    found = ours.search(data.queries, K)
    reached = vectors.recall(found.labels, data.truth)
    theirs, ef, their_recall, setting = _best_rival(data, reached, rival)
    cells, worst = [], None
    for kind in ("batch", "single"):
        blocks = _pairs(kind, ours, theirs, data.queries, options)
        ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
        worst = ratio if worst is None or ratio["value"] < worst["value"] else worst
        per = BATCH if kind == "batch" else SINGLES
        speeds = [per / float(np.median(times)) for times in (blocks.ours, blocks.theirs)]
        cells.append(
            [
                data.name, f"{len(data.base)} x {data.base.shape[1]}",
                f"{reached:.4f} / {their_recall:.4f}", f"{ours.now.stats().effort} / {ef} (M {setting[0]})", kind,
                *(f"{speed:,.0f}" for speed in speeds),
                f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                f"{ratio['n']} ({blocks.dropped})",
            ]
        )  # fmt: skip
        body.samples[f"{data.name}/{kind}"] = blocks.samples()
    assert worst is not None
    rival.best[data.name] = f"M {setting[0]}, ef {ef}"
    return cells, worst, ours


def build(base: Rows) -> Index:
    """Fill our index and let its maintenance finish, as the service does."""
    index = Index(base.shape[1], "dot", exact_below=10_000, threads=THREADS)
    for start in range(0, len(base), 5000):
        part = base[start : start + 5000]
        labels = np.arange(start, start + len(part), dtype=np.int64)
        index.publish(part, labels, labels, np.zeros(0, np.int64))
    while index.maintain():
        pass
    return index


def _best_rival(
    data: DataSet, reached: float, rival: Rival
) -> tuple[Any, int, float, tuple[int, int]]:
    """Return hnswlib at its fastest setting whose recall is at least ours."""
    best: tuple[float, Any, int, float, tuple[int, int]] | None = None
    for links, construction in BUILDS:
        graph = hnswlib.Index("ip", data.base.shape[1])
        graph.init_index(len(data.base), M=links, ef_construction=construction)
        graph.add_items(data.base, np.arange(len(data.base)), num_threads=THREADS)
        for ef in EF:
            graph.set_ef(ef)
            began = time.perf_counter()
            labels, _ = graph.knn_query(data.queries, K, num_threads=THREADS)
            seconds = time.perf_counter() - began
            got = vectors.recall(labels, data.truth)
            tried = {"data": data.name, "M": links, "ef_construction": construction, "ef": ef}
            rival.settings_tried.append({**tried, "recall": got, "per_s": len(labels) / seconds})
            if got >= reached - 0.001 or ef == EF[-1]:
                if best is None or seconds < best[0]:
                    best = (seconds, graph, ef, got, (links, construction))
                break
    assert best is not None
    best[1].set_ef(best[2])
    return best[1:]


def _pairs(kind: str, ours: Index, theirs: Any, queries: Rows, options: BenchOptions) -> Blocks:
    def batch(search: Callable[[Rows], Any]) -> Callable[[int], None]:
        def once(number: int) -> None:
            start = number * BATCH % (len(queries) - BATCH)
            search(queries[start : start + BATCH])

        return once

    def single(search: Callable[[Rows], Any]) -> Callable[[int], None]:
        def once(number: int) -> None:
            start = number * SINGLES % (len(queries) - SINGLES)
            for i in range(start, start + SINGLES):
                search(queries[i : i + 1])

        return once

    made = batch if kind == "batch" else single
    return measure_pairs(
        made(lambda q: ours.search(q, K)),
        made(lambda q: theirs.knn_query(q, K, num_threads=THREADS)),
        pairs=options.rounds(300, 20),
    )
