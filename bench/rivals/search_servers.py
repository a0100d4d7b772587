"""The servers that V1 searches: what each is asked, how it is set, and how rivals start on indexes kept on disk."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from bench import ROOT
from bench.document import BenchOptions
from bench.mesh.probe import MeshError
from bench.rivals import environments
from bench.rivals.completion_servers import serve
from bench.workloads.http_link import HttpLinks, post
from bench.workloads.search_sets import LARGEST, K, SearchSet, SetShape
from bench.workloads.vectors import Rows

Setting = Mapping[str, str | int]
EFS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
LANCEDB, MILVUS_LITE, CHROMA = "lancedb", "milvus-lite", "chroma"
FILL = 2000  # rows a request


class SearchServer(Protocol):
    """A server with the rows of one data set.

    A ladder is a list of settings, each slower and more exact than the one before. A call is a request ready to be
    sent, whatever the server's protocol.
    """

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""

    def ladders(self, bound: int | None) -> Sequence[Sequence[Setting]]:
        """Return the settings to try for a filter; none if the server chooses for itself."""

    def widths(self, clients: int) -> Sequence[Setting]:
        """Return what is tried on top where so many requests are in flight."""

    async def use(self, setting: Setting) -> None:
        """Search with a setting from now on."""

    def calls(self, queries: Rows, per: int, bound: int | None) -> list[Any]:
        """Return calls of `per` queries each, in order, among the rows whose bucket is below a bound."""

    async def send(self, call: Any) -> Any:
        """Return the answer of a call; an error if it failed."""

    def ids(self, answer: Any) -> list[list[int]]:
        """Return the ids of an answer's hits, by query."""


def parts(queries: Rows, per: int) -> list[Rows]:
    """Return the queries of each call."""
    return [queries[at : at + per] for at in range(0, len(queries) - per + 1, per)]


def builds_of(shape: SetShape, all_of: Iterable[str], large: Sequence[str]) -> Sequence[str]:
    """Return the builds of a rival's index that a data set gets: all, or of very many rows a few."""
    return large if shape.rows > LARGEST else tuple(all_of)


def kept(rows: SearchSet, name: str, options: BenchOptions) -> Path:
    """Return where a server keeps its index of a data set."""
    return options.setup_dir / "indexes" / rows.folder.name / name


@dataclass(frozen=True, slots=True)
class ThinServer:
    """LanceDB or Milvus Lite behind the thin server."""

    name: str
    url: str
    pids: tuple[int, ...]
    links: HttpLinks

    def ladders(self, bound: int | None) -> Sequence[Sequence[Setting]]:  # noqa: ARG002
        """Return the efs of each build; vectors of 8 bits with so many hits scored exactly."""
        if self.name == MILVUS_LITE:
            return [[{"build": "hnsw", "ef": ef} for ef in EFS]]
        return [
            [{"build": "hnsw-flat", "ef": ef} for ef in EFS],
            [{"build": "hnsw-sq", "ef": ef, "refine": 2} for ef in EFS if ef >= 2 * K],
        ]

    def widths(self, clients: int) -> Sequence[Setting]:  # noqa: ARG002
        """Return nothing to try."""
        return [{}]

    async def use(self, setting: Setting) -> None:
        """Set it."""
        await self.links.send(post(self.url, "/setting", msgspec.json.encode(dict(setting))))

    def calls(self, queries: Rows, per: int, bound: int | None) -> list[bytes]:
        """Return requests with vectors in base64."""
        bodies = (
            {"vectors": [base64.b64encode(row.tobytes()).decode() for row in part], "k": K, "below": bound}
            for part in parts(queries, per)
        )  # fmt: skip
        return [post(self.url, "/search", msgspec.json.encode(body)) for body in bodies]

    async def send(self, call: bytes) -> bytes:
        """Return the answer's body."""
        return await self.links.send(call)

    def ids(self, answer: bytes) -> list[list[int]]:
        """Return the ids of an answer's hits, by query."""
        found: list[list[int]] = msgspec.json.decode(answer)["ids"]
        return found


@contextlib.asynccontextmanager
async def thin_server(
    name: str, rows: SearchSet, options: BenchOptions
) -> AsyncIterator[ThinServer]:
    """Run LanceDB or Milvus Lite behind the thin server, its index built if it is not there."""
    python = environments.python(name, options.setup_dir)
    if python is None:
        raise FileNotFoundError(f"{name} is not set up")
    script = str(ROOT / "bench" / "rivals" / "thin_search_server.py")
    folder = kept(rows, name, options)
    if not (folder / "complete").exists():
        _emptied(folder)
        process = await asyncio.create_subprocess_exec(
            str(python), "-P", script, "build", name, str(rows.folder), str(folder / "index")
        )
        if await process.wait():
            raise MeshError(f"{name}: its index was not built")
        (folder / "complete").touch()
    argv = [str(python), "-P", script, "serve", name, str(folder / "index")]
    async with serve(argv, ready="/health") as started, HttpLinks(started.url) as links:
        yield ThinServer(name, started.url, (started.pid,), links)


CHROMA_BUILDS: dict[str, dict[str, int]] = {
    "m16": {"max_neighbors": 16, "ef_construction": 100},
    "m24": {"max_neighbors": 24, "ef_construction": 200},
}
# Of a million rows it did as much as m16 or more in every cell of V1.
LARGE_CHROMA_BUILDS = ("m24",)
_COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"


class ChromaServer:
    """Chroma's own server, asked by its API of version 2; one collection for each build.

    It takes over a collection's ef only as it opens its graph, so that a setting means a start.
    """

    def __init__(self, argv: list[str], builds: Sequence[str]) -> None:
        self._argv, self._builds = argv, builds
        self._running = contextlib.AsyncExitStack()
        self._url, self._links = "", HttpLinks("")
        self._ids: dict[str, str] = {}
        self._build, self._ef = builds[0], 0
        self.pids: tuple[int, ...] = ()

    async def start(self) -> None:
        """Start the process, and find the collections, made if they are not there."""
        env = {"ANONYMIZED_TELEMETRY": "False"}
        enter = self._running.enter_async_context
        started = await enter(serve(self._argv, env, ready="/api/v2/heartbeat"))
        self._url, self.pids = started.url, (started.pid,)
        self._links = await enter(HttpLinks(started.url))
        for name in self._builds:
            hnsw = {"space": "ip", **CHROMA_BUILDS[name]}
            body = {"name": name, "get_or_create": True, "configuration": {"hnsw": hnsw}}
            answer = await self.send(post(self._url, _COLLECTIONS, msgspec.json.encode(body)))
            self._ids[name] = msgspec.json.decode(answer)["id"]

    async def stop(self) -> None:
        """End the process."""
        await self._running.aclose()

    def ladders(self, bound: int | None) -> Sequence[Sequence[Setting]]:  # noqa: ARG002
        """Return the efs of each build."""
        return [[{"build": build, "ef": ef} for ef in EFS] for build in self._builds]

    def widths(self, clients: int) -> Sequence[Setting]:  # noqa: ARG002
        """Return nothing to try."""
        return [{}]

    async def use(self, setting: Setting) -> None:
        """Choose a collection, set its ef, and start anew if that is another one."""
        build, ef = str(setting["build"]), int(setting["ef"])
        if (build, ef) == (self._build, self._ef):
            return
        body = {"new_configuration": {"hnsw": {"ef_search": ef}}}
        path = f"{_COLLECTIONS}/{self._ids[build]}"
        put = post(self._url, path, msgspec.json.encode(body)).replace(b"POST", b"PUT", 1)
        await self.send(put)
        await self.stop()
        self._build, self._ef = build, ef
        await self.start()

    def calls(self, queries: Rows, per: int, bound: int | None) -> list[bytes]:
        """Return requests with vectors as JSON numbers, which is what it takes."""
        path = f"{_COLLECTIONS}/{self._ids[self._build]}/query"
        where = {} if bound is None else {"where": {"bucket": {"$lt": bound}}}
        bodies = (
            {"query_embeddings": part.tolist(), "n_results": K, "include": ["distances"], **where}
            for part in parts(queries, per)
        )
        return [post(self._url, path, msgspec.json.encode(body)) for body in bodies]

    async def send(self, call: bytes) -> bytes:
        """Return the answer's body."""
        return await self._links.send(call)

    def ids(self, answer: bytes) -> list[list[int]]:
        """Return the ids of an answer's hits, by query."""
        return [[int(each) for each in row] for row in msgspec.json.decode(answer)["ids"]]

    async def fill(self, rows: SearchSet) -> None:
        """Store the rows in a collection for each build."""
        base: Rows = np.asarray(rows.base)
        for name in self._builds:
            path = f"{_COLLECTIONS}/{self._ids[name]}/add"
            for at in range(0, len(base), FILL):
                part = base[at : at + FILL]
                body = {
                    "ids": [str(at + i) for i in range(len(part))],
                    "embeddings": part.tolist(),
                    "metadatas": [{"bucket": int(each)} for each in rows.buckets[at : at + FILL]],
                }
                await self._links.send(post(self._url, path, msgspec.json.encode(body)))


@contextlib.asynccontextmanager
async def chroma(rows: SearchSet, options: BenchOptions) -> AsyncIterator[ChromaServer]:
    """Run Chroma's server, filled if its directory is not."""
    python = environments.python(CHROMA, options.setup_dir)
    if python is None:
        raise FileNotFoundError(f"{CHROMA} is not set up")
    folder = kept(rows, CHROMA, options)
    if not (folder / "complete").exists():
        _emptied(folder)
    argv = [str(python.parent / "chroma"), "run", "--path", str(folder / "index")]
    server = ChromaServer(argv, builds_of(rows.shape, CHROMA_BUILDS, LARGE_CHROMA_BUILDS))
    await server.start()
    try:
        if not (folder / "complete").exists():
            await server.fill(rows)
            (folder / "complete").touch()
        yield server
    finally:
        await server.stop()


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
