"""A thin server over LanceDB or Milvus Lite, which are libraries: searches by HTTP, vectors in base64.

`python thin_search_server.py build ENGINE ROWS INDEX` fills and indexes the directory INDEX from the directory ROWS, in
the engine's own environment; `python thin_search_server.py serve ENGINE INDEX --host H --port P` serves it. POST
/setting takes one of the settings that a sweep tries, POST /search queries.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Words = Mapping[str, str | int]
Found = tuple[list[list[int]], list[list[float]]]
BUILDS: dict[str, dict[str, dict[str, int]]] = {
    "lancedb": {
        "hnsw-flat": {"num_partitions": 1, "m": 16, "ef_construction": 200},
        "hnsw-sq": {"num_partitions": 1, "m": 16, "ef_construction": 200},
    },
    "milvus-lite": {"hnsw": {"M": 16, "efConstruction": 200}},
}
PART = 20_000  # rows stored at once
THREADS = 2
METRIC = "dot"


class NeighbourEngine(Protocol):
    """A library that finds the k nearest of each query, among all rows or those whose bucket is below a bound."""

    async def build(self, rows: Any, buckets: Any) -> None:
        """Store the rows and index them."""

    async def use(self, setting: Words) -> None:
        """Search with a setting from now on."""

    async def search(self, queries: list[bytes], k: int, below: int | None) -> Found:
        """Return the ids and scores of each query's nearest rows; a query is float32."""


class Lance:
    """LanceDB's asynchronous table, one for each build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._setting: Words = {}
        self._table: Any = None

    async def build(self, rows: Any, buckets: Any) -> None:
        """Store the rows once for each build, and index them."""
        import lancedb  # type: ignore[import-not-found]  # noqa: PLC0415 - in its environment only
        import pyarrow as pa  # type: ignore[import-not-found]  # noqa: PLC0415
        from lancedb.index import BTree, HnswFlat, HnswSq  # type: ignore[import-not-found]  # noqa: PLC0415

        kinds = {"hnsw-flat": HnswFlat, "hnsw-sq": HnswSq}
        database = await lancedb.connect_async(str(self._folder))
        for name, build in BUILDS["lancedb"].items():
            flat = pa.array(rows.reshape(-1))
            columns = {
                "id": pa.array(np.arange(len(rows))),
                "bucket": pa.array(buckets),
                "vector": pa.FixedSizeListArray.from_arrays(flat, rows.shape[1]),
            }
            table = await database.create_table(name, pa.table(columns))
            await table.create_index("bucket", config=BTree())
            await table.create_index("vector", config=kinds[name](distance_type=METRIC, **build))
            print(f"{name}: {await table.list_indices()}", flush=True)

    async def use(self, setting: Words) -> None:
        """Open the setting's table."""
        import lancedb  # noqa: PLC0415

        if self._table is None or self._setting["build"] != setting["build"]:
            database = await lancedb.connect_async(str(self._folder))
            self._table = await database.open_table(setting["build"])
            await self._table.prewarm_index("vector_idx")
        self._setting = setting

    async def search(self, queries: list[bytes], k: int, below: int | None) -> Found:
        """Ask all queries at once; LanceDB marks each hit with its query's number."""
        rows = [np.frombuffer(each, np.float32) for each in queries]
        query = (
            self._table.query().nearest_to(rows if len(rows) > 1 else rows[0]).distance_type(METRIC)
        )
        query = query.limit(k).ef(self._setting["ef"]).select(["id", "_distance"])
        if "refine" in self._setting:
            query = query.refine_factor(self._setting["refine"])
        if below is not None:
            query = query.where(f"bucket < {below}")
        found = await query.to_arrow()
        ids, scores = found["id"].to_pylist(), found["_distance"].to_pylist()
        if len(rows) == 1:
            return [ids], [scores]
        shown: Found = [[] for _ in rows], [[] for _ in rows]
        for number, name, score in zip(found["query_index"].to_pylist(), ids, scores, strict=True):
            shown[0][number].append(name)
            shown[1][number].append(score)
        return shown


class Milvus:
    """Milvus Lite's engine, called directly, without gRPC; searches run on threads."""

    def __init__(self, folder: Path) -> None:
        # One segment: as many rows as there are are written at once, since each segment has a graph of its own.
        os.environ["MILVUS_LITE_MEMTABLE_MEMORY_LIMIT_BYTES"] = str(8 << 30)
        os.environ["MILVUS_LITE_WAL_SIZE_LIMIT_BYTES"] = str(8 << 30)
        from milvus_lite import MilvusLite  # type: ignore[import-not-found]  # noqa: PLC0415

        self._database = MilvusLite(str(folder))
        self._pool = ThreadPoolExecutor(THREADS)
        self._table: Any = None
        self._ef = 0

    async def build(self, rows: Any, buckets: Any) -> None:
        """Store the rows in one segment, and index them."""
        from milvus_lite import CollectionSchema, DataType, FieldSchema  # noqa: PLC0415

        fields = [
            FieldSchema(name="id", dtype=DataType.INT64, is_primary=True),
            FieldSchema(name="bucket", dtype=DataType.INT64),
            FieldSchema(name="vector", dtype=DataType.FLOAT_VECTOR, dim=rows.shape[1]),
        ]
        table = self._database.create_collection("rows", CollectionSchema(fields=fields))
        for start in range(0, len(rows), PART):
            part = rows[start : start + PART].tolist()
            table.insert(
                [
                    {"id": start + i, "bucket": int(buckets[start + i]), "vector": row}
                    for i, row in enumerate(part)
                ]
            )
        table.flush()
        index = {"index_type": "HNSW", "metric_type": "IP", "params": BUILDS["milvus-lite"]["hnsw"]}
        table.create_index("vector", index)
        table.create_index("bucket", {"index_type": "INVERTED"})
        table.load()
        self._database.close()

    async def use(self, setting: Words) -> None:
        """Search with this ef."""
        if self._table is None:
            self._table = self._database.get_collection("rows")
            self._table.load()
        self._ef = int(setting["ef"])

    async def search(self, queries: list[bytes], k: int, below: int | None) -> Found:
        """Ask all queries at once."""
        import asyncio  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._search, queries, k, below)

    def _search(self, queries: list[bytes], k: int, below: int | None) -> Found:
        rows = [np.frombuffer(each, np.float32).tolist() for each in queries]
        found = self._table.search(
            rows, top_k=k, metric_type="IP", anns_field="vector", output_fields=["id"],
            expr=None if below is None else f"bucket < {below}", search_params={"ef": self._ef},
        )  # fmt: skip
        ids = [[hit["id"] for hit in row] for row in found]
        return ids, [[hit["distance"] for hit in row] for row in found]


ENGINES: dict[str, Callable[[Path], NeighbourEngine]] = {"lancedb": Lance, "milvus-lite": Milvus}


async def build(engine: str, source: Path, folder: Path) -> None:
    """Fill the index' directory."""
    rows, buckets = np.load(source / "base.npy"), np.load(source / "buckets.npy")
    await ENGINES[engine](folder).build(rows, buckets)


async def serve(engine: str, folder: Path, host: str, port: int) -> None:
    """Serve until a signal ends it."""
    import asyncio  # noqa: PLC0415

    import msgspec  # noqa: PLC0415 - the environment's own
    from aiohttp import web  # noqa: PLC0415

    searched: NeighbourEngine = ENGINES[engine](folder)

    async def setting(request: web.Request) -> web.Response:
        await searched.use(msgspec.json.decode(await request.read()))
        return web.Response(text="{}")

    async def search(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        queries = [base64.b64decode(each) for each in body["vectors"]]
        ids, scores = await searched.search(queries, body["k"], body["below"])
        found = msgspec.json.encode({"ids": ids, "scores": scores})
        return web.Response(body=found, content_type="application/json")

    async def health(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/setting", setting)
    app.router.add_post("/search", search)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    """Build or serve, as the command line says."""
    import uvloop  # noqa: PLC0415

    what, engine, *more = argv
    if what == "build":
        source, folder = map(Path, more)
        uvloop.run(build(engine, source, folder))
        return
    named = dict(zip(more[1::2], more[2::2], strict=True))
    uvloop.run(serve(engine, Path(more[0]), named["--host"], int(named["--port"])))


if __name__ == "__main__":
    main(sys.argv[1:])
