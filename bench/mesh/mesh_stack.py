"""This product under the mix of H2: the processes that `spillway up` starts, asked by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from spillway_client import AsyncSpillway

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.rivals.completion_servers import Weights
from bench.workloads.mixed_load import StackError, StoredText, TextCorpus
from bench.workloads.turns import System
from loadgen.bodies import Request
from loadgen.target import Target

COLLECTION = "pieces"
PART = 500  # documents stored by one request before the load begins
SETTLE_S, REMOVED_S = 2.0, 60.0
RETRIES = 10  # of the client that fills and clears: after overload its first tries may be refused


@dataclass(frozen=True, slots=True)
class MeshStack:
    """A running mesh with a collection of pieces; ingest is sent with low priority, as its documentation says."""

    system: System
    pids: tuple[int, ...]
    target: Target
    client: AsyncSpillway

    async def embed(self, texts: Sequence[str]) -> None:
        """Embed texts."""
        await self._post("/v1/embeddings", {"input": texts, "encoding_format": "base64"})

    async def search(self, text: str, k: int) -> list[str]:
        """Return the ids of the nearest pieces."""
        found = await self._post(f"/v1/collections/{COLLECTION}/search", {"text": text, "k": k})
        return [hit["id"] for hit in msgspec.json.decode(found)["data"]]

    async def ingest(self, documents: Sequence[StoredText]) -> None:
        """Store documents; returns when they are on disk and can be found."""
        body = {"documents": [each._asdict() for each in documents]}
        low = {"Spillway-Priority": "low"}
        await self._post(f"/v1/collections/{COLLECTION}/documents", body, low)

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove documents; ids that do not exist are no error."""
        for start in range(0, len(ids), PART):
            await self.client.documents(COLLECTION).delete(ids[start : start + PART])
        with contextlib.suppress(
            TimeoutError
        ):  # what is left to index does not keep searches from being served
            await settled(self.client, REMOVED_S)

    async def _post(self, path: str, body: object, headers: dict[str, str] | None = None) -> bytes:
        answer = await self.target.send(Request(path, msgspec.json.encode(body), 1), headers)
        if not 200 <= answer.status < 300:
            raise StackError(f"status {answer.status}: {answer.code}")
        return answer.body


@contextlib.asynccontextmanager
async def mesh_stack(found: Weights, pieces: TextCorpus, folder: Path) -> AsyncIterator[MeshStack]:
    """Run the product with its defaults and a chat model in bf16, its collection filled and indexed."""
    worker = processes.chat_worker(
        "gpu_worker", "--device", "cpu", model=str(found.directory), dtype="bf16"
    )
    services = [processes.router(), worker, processes.vector_search(), processes.kv_store()]
    env = {
        "SPILLWAY_KV_BYTES": str(found.kv_bytes),
        "SPILLWAY_HOST_KV_BYTES": str(found.host_bytes),
    }
    async with (
        LocalMesh(folder, services, env=env) as mesh,
        AsyncSpillway(mesh.url, timeout_s=300, max_retries=RETRIES) as client,
        Target([mesh.url]) as target,
    ):
        await client.collections.create(COLLECTION)
        for start in range(0, len(pieces.stored), PART):
            part = pieces.stored[start : start + PART]
            await client.documents(COLLECTION).add([each._asdict() for each in part])
        await settled(client)
        pids = tuple(mesh.pid(name) for name in mesh.names())
        system = System(mesh.url, found.vocabulary, more={"ignore_eos": True}, pids=pids)
        yield MeshStack(system, pids, target, client)


async def settled(
    client: AsyncSpillway, timeout_s: float = 300.0, collection: str = COLLECTION
) -> None:
    """Wait until a collection is being indexed no more."""
    async with asyncio.timeout(timeout_s):
        before = None
        while True:
            now = (await client.collections.get(collection)).stats or {}
            if now == before and not now["newer"]:
                return
            before = now
            await asyncio.sleep(SETTLE_S)
