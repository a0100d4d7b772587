"""This product as V1 and V2 search it: a mesh with one collection of vectors, kept on disk while its code stays."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from spillway_client import AsyncSpillway

from bench.document import BenchOptions
from bench.hot_path import digest
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.processes import Service
from bench.rivals.search_servers import Setting, kept
from bench.workloads.http_link import HttpLinks, post
from bench.workloads.search_sets import K, SearchSet
from bench.workloads.vectors import Rows
from loadgen import bodies

COLLECTION = "rows"
FILL, FILL_NUMBERS = 2000, 1 << 20  # rows a request, if these have no more numbers
# What lies on disk depends on this code: of other code it is made anew.
WRITERS = (
    "services/vector_search", "common/bus/writes.py", "common/registry", "common/wire", "bench/mesh/search_mesh.py",
)  # fmt: skip


def services() -> list[Service]:
    """Return the processes that serve searches by vector."""
    return [processes.router(), processes.sim_worker(), processes.vector_search()]


@dataclass(frozen=True, slots=True)
class SpillwayServer:
    """A running mesh under the load of V1: its effort is its own choice."""

    mesh: LocalMesh
    links: HttpLinks

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""
        return tuple(self.mesh.pid(name) for name in self.mesh.names())

    def ladders(self, bound: int | None) -> Sequence[Sequence[Setting]]:  # noqa: ARG002
        """Return nothing to try: the default rule is what is measured."""
        return []

    def widths(self, clients: int) -> Sequence[Setting]:  # noqa: ARG002
        """Return nothing to try."""
        return [{}]

    async def use(self, setting: Setting) -> None:
        """Change nothing."""

    def calls(self, queries: Rows, per: int, bound: int | None) -> list[bytes]:
        """Return requests as the SDK makes them."""
        chosen = {} if bound is None else {"filter": {"bucket": {"$lt": bound}}}
        made = bodies.search(COLLECTION, queries, queries=per, k=K, **chosen)
        return [post(self.mesh.url, each.path, each.body) for each in made]

    async def send(self, call: bytes) -> bytes:
        """Return the answer's body."""
        return await self.links.send(call)

    def ids(self, answer: bytes) -> list[list[int]]:
        """Return the ids of an answer's hits, by query."""
        found = msgspec.json.decode(answer)["data"]
        if found and "data" not in found[0]:
            return [[int(hit["id"]) for hit in found]]
        found.sort(key=lambda row: row["index"])
        return [[int(hit["id"]) for hit in row["data"]] for row in found]


async def fill(mesh: LocalMesh, rows: SearchSet, shards: int | None = None) -> None:
    """Store rows as documents `0`, `1`, … of a collection of vectors, what filters ask for as metadata.

    With `shards` it is spread over processes; without, the only one has all of it.
    """
    async with (
        AsyncSpillway(mesh.url, timeout_s=300) as client,
        HttpLinks(mesh.url) as links,
    ):
        dimension = rows.base.shape[1]
        await client.collections.create(
            COLLECTION, dimension=dimension, metric="dot", model=None, shards=shards
        )
        numbers = {"bucket": rows.buckets, "place": rows.places}
        some = min(FILL, FILL_NUMBERS // dimension)
        for start in range(0, len(rows.base), some):
            part = rows.base[start : start + some]
            about = [
                {name: int(each[start + i]) for name, each in numbers.items()}
                for i in range(len(part))
            ]
            await links.send(documents(mesh.url, part, start, about))


def documents(
    url: str, part: Rows, start: int, metadata: Sequence[dict[str, int]] | None = None
) -> bytes:
    """Return the request that stores rows as documents from the number `start` on."""
    given: list[dict[str, Any]] = []
    for i, row in enumerate(part.tolist()):
        about = {} if metadata is None else {"metadata": metadata[i]}
        given.append({"id": str(start + i), "vector": row, **about})
    body = msgspec.json.encode({"documents": given})
    return post(url, f"/v1/collections/{COLLECTION}/documents", body)


async def indexed(client: AsyncSpillway, timeout_s: float = 3600.0) -> None:
    """Wait until the collection's graph serves and takes in nothing any more."""
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        before = (await client.collections.get(COLLECTION)).stats or {}
        await asyncio.sleep(2.0)
        after = (await client.collections.get(COLLECTION)).stats or {}
        if after.get("index") == "graph" and not after["newer"] and before == after:
            return
    raise TimeoutError(f"the collection was not indexed within {timeout_s:g} s")


async def ef(mesh: LocalMesh) -> int:
    """Return the ef by which a collection is served."""
    async with AsyncSpillway(mesh.url) as client:
        return int(((await client.collections.get(COLLECTION)).stats or {})["ef"])


def kept_mesh(rows: SearchSet, options: BenchOptions) -> Path:
    """Return where the mesh of this code keeps its data."""
    return kept(rows, f"ours-{digest(WRITERS)[:12]}", options)


@contextlib.asynccontextmanager
async def search_mesh(
    rows: SearchSet, options: BenchOptions, given: Sequence[Service] = ()
) -> AsyncIterator[SpillwayServer]:
    """Run a mesh with the rows, filled if what its directory holds was not written by this code."""
    folder = kept_mesh(rows, options)
    if not (folder / "complete").exists():
        for each in folder.parent.glob("ours-*"):
            shutil.rmtree(each)
        folder.mkdir(parents=True)
    async with LocalMesh(folder, given or services()) as mesh, HttpLinks(mesh.url) as links:
        if not (folder / "complete").exists():
            await fill(mesh, rows)
        async with AsyncSpillway(mesh.url, timeout_s=300) as client:
            await indexed(client)
        (folder / "complete").touch()
        yield SpillwayServer(mesh, links)
