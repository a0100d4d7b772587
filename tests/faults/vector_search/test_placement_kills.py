"""Processes are killed while a placed collection is written, searched, split and moved; `make soak` kills 100 times.

Nothing that was acknowledged is lost, every hit has the score of what was written, and with its token a client never
sees a document that it has deleted, nor misses one that it has written, by its vector or by its words.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Coroutine
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.conftest import PROFILE
from tests.support.mesh import Mesh, Process
from tests.support.waiting import until

KILLS = 100 if PROFILE == "soak" else 4
WRITERS, EACH, DIMENSION, PROCESSES, MOST_SHARDS = 3, 15, 16, 3, 8
PROGRESS = 12  # operations that succeed between two kills
LIMIT_S = 120.0  # ends a test in which nothing goes on
_AGAIN_S = 0.05


def vector(name: str, version: int) -> Any:
    """Return the vector of one version of a document, the same everywhere."""
    seed = int.from_bytes(f"{name}/{version}".encode(), "little") % (1 << 63)
    return np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)


def word(name: str, version: int) -> str:
    """Return the word that only one version of a document holds."""
    return f"{name.replace('-', 'x')}v{version}"


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


class Oracle:
    """What clients were told: the version of each document (None: deleted), and the newest write of each shard."""

    def __init__(self) -> None:
        self.versions: dict[str, list[int]] = {}  # all that were ever sent
        self.present: dict[str, int | None] = {}  # as acknowledged
        self.changing: set[str] = set()
        self.token: list[str] = []
        self.done = 0

    def applied(self, token: str) -> None:
        """Take note of the token of an acknowledged write."""
        for place, part in enumerate(token.split(",")):
            if place == len(self.token):
                self.token.append("")
            order = [tuple(map(int, each.split("-"))) for each in (part, self.token[place]) if each]
            if part and tuple(map(int, part.split("-"))) == max(order):
                self.token[place] = part


class World:
    """The processes, the requests to them, and the tasks that drive them."""

    def __init__(self, seed: int) -> None:
        self.random, self.oracle = random.Random(seed), Oracle()
        self.mesh = Mesh()
        self.http: aiohttp.ClientSession
        self.path = "/v1/collections/kills"
        self.stopping = False
        self.refused = self.moves = 0

    def start(self) -> None:
        for number in range(1, PROCESSES):
            self.mesh.add("vector_search", str(number))
        self.routers = [self.mesh.router, self.mesh.add_router("1")]
        self.search = [each for each in self.mesh.processes if each.service == "vector_search"]
        for each in (*self.search, *self.routers):
            each.ports()

    async def call(
        self, method: str, path: str, body: Any = None, key: str = ""
    ) -> tuple[int, Any]:
        """Ask any router until one answers; with a key all tries are one request."""
        headers = {"Idempotency-Key": key} if key else {}
        async with asyncio.timeout(LIMIT_S):
            while True:
                router = self.random.choice(self.routers)
                try:
                    url = self.mesh.address(router) + path
                    async with self.http.request(method, url, json=body, headers=headers) as reply:
                        return reply.status, await reply.json()
                except (aiohttp.ClientError, OSError, RuntimeError, ValueError):
                    await asyncio.sleep(_AGAIN_S)

    async def must(self, method: str, path: str, body: Any) -> Any:
        """Ask until it is done; each try that was answered with an error is over, and another one begins."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                status, reply = await self.call(method, path, body, uuid.uuid4().hex)
                if status in {200, 201}:
                    return reply
                assert status in {429, 503, 504}, reply
                await asyncio.sleep(_AGAIN_S)

    # -- what runs at the same time

    async def write(self, writer: int) -> None:
        """Store and delete this writer's documents, and search for each with the token of its write."""
        oracle, version = self.oracle, 0
        while not self.stopping:
            name, version = f"w{writer}-{self.random.randrange(EACH)}", version + 1
            oracle.changing.add(name)
            if oracle.present.get(name) is not None and self.random.random() < 0.3:
                reply = await self.must("POST", f"{self.path}/documents/delete", {"ids": [name]})
                oracle.present[name] = None
            else:
                oracle.versions.setdefault(name, []).append(version)
                document = {
                    "id": name,
                    "vector": vector(name, version).tolist(),
                    "text": f"all say {word(name, version)}",
                }
                reply = await self.must("POST", f"{self.path}/documents", {"documents": [document]})
                oracle.present[name] = version
            oracle.applied(reply["applied"])
            await self.look(name, reply["applied"])
            oracle.changing.discard(name)
            oracle.done += 1

    async def look(self, name: str, token: str) -> None:
        """With the token of its last write, a document is found as written, or not at all if it was deleted."""
        oracle, last = self.oracle, self.oracle.versions[name][-1]
        query = vector(name, last)
        body = {"vector": query.tolist(), "k": 3, "after": token}
        found = await self.must("POST", f"{self.path}/search", body)
        hits = {hit["id"]: hit["score"] for hit in found["data"]}
        if oracle.present[name] is None:
            assert name not in hits, (name, found)
        else:
            assert hits.get(name, 0.0) == pytest.approx(1.0, abs=1e-4), (name, found)
        body = {"text": word(name, last), "mode": "text", "after": token}
        found = await self.must("POST", f"{self.path}/search", body)
        expected = [] if oracle.present[name] is None else [name]
        assert ([hit["id"] for hit in found["data"]], found.get("text_indexed")) == (expected, None)

    async def read(self) -> None:
        """Search with the newest token: every score is right, and nothing that was deleted comes back."""
        oracle = self.oracle
        while not self.stopping:
            query = vector("query", self.random.randrange(1000))
            gone = {n for n, v in oracle.present.items() if v is None} - oracle.changing
            partial = self.random.random() < 0.2
            body = {"vector": query.tolist(), "k": 10, "after": ",".join(oracle.token)}
            key = uuid.uuid4().hex if self.random.random() < 0.2 else ""
            status, found = await self.call(
                "POST", f"{self.path}/search", {**body, "partial": partial}, key
            )
            if status != 200:
                assert status in {429, 503, 504}, found
                self.refused += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            gone -= oracle.changing  # may have been written again meanwhile
            for hit in found["data"]:
                scores = [cosine(query, vector(hit["id"], v)) for v in oracle.versions[hit["id"]]]
                assert any(abs(hit["score"] - score) < 1e-4 for score in scores), hit
                back = hit["id"] in gone and oracle.present[hit["id"]] is None
                assert not back, (hit, body, found)
            oracle.done += 1

    async def operate(self) -> None:
        """Split, move, and set the number of replicas, again and again; what cannot be done now is refused."""
        while not self.stopping:
            listed = (await self.call("GET", f"{self.path}/shards"))[1]
            one = self.random.choice(listed["data"])
            verb = self.random.choice(["split", "move", "replicas", "rest"])
            if verb == "split" and len(listed["data"]) < MOST_SHARDS:
                await self.call("POST", f"{self.path}/shards/{one['shard']}/split")
            elif verb == "move":
                body = {"from": self.random.choice(one["replicas"])["name"]}
                path = f"{self.path}/shards/{one['shard']}/move"
                self.moves += (await self.call("POST", path, body))[0] == 200
            elif verb == "replicas":
                wanted = self.random.choice([1, 2, 2])
                await self.call("POST", f"{self.path}/replicas", {"replicas": wanted})
            await asyncio.sleep(_AGAIN_S)

    async def progress(self, operations: int, kills: int) -> None:
        """Wait until so many more operations have succeeded."""
        wanted = self.oracle.done + operations

        async def done() -> bool:
            return self.oracle.done >= wanted

        await until(done, f"progress after {kills} kills", seconds=LIMIT_S)

    async def amid(
        self, killing: Coroutine[Any, Any, None], *work: Coroutine[Any, Any, None]
    ) -> None:
        """Do all the work until the killing is over; the first that fails fails it all."""
        tasks = [asyncio.create_task(each) for each in (killing, *work)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        self.stopping = True
        await asyncio.gather(*tasks)

    async def kill(self) -> None:
        """Kill one process after another, and start it again, each time when some operations have succeeded."""
        for number in range(KILLS):
            await self.progress(PROGRESS, number)
            victim: Process = self.random.choice([*self.search, *self.search, *self.routers])
            await asyncio.to_thread(victim.kill)
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
            await asyncio.to_thread(victim.start)

    # -- the end

    async def settled(self) -> bool:
        listed = (await self.call("GET", f"{self.path}/shards"))[1]
        return all(
            not one["split"]
            and all(each["state"] == "serving" and each["alive"] for each in one["replicas"])
            for one in listed["data"]
        )

    async def check(self) -> None:
        """Everything acknowledged is there as written, and nothing else."""
        await until(self.settled, "settled shards", seconds=LIMIT_S)
        listed = await self.must_get(f"{self.path}/documents?limit=1000&include=vectors")
        there = {doc["id"]: np.array(doc["vectors"][0], np.float32) for doc in listed}
        present = {name: v for name, v in self.oracle.present.items() if v is not None}
        assert there.keys() == present.keys()
        for name, version in present.items():
            assert cosine(there[name], vector(name, version)) == pytest.approx(1.0, abs=1e-4)

    async def must_get(self, path: str) -> list[Any]:
        """Return all pages of a list."""
        async with asyncio.timeout(LIMIT_S):
            found: list[Any] = []
            after = ""
            while True:
                status, page = await self.call("GET", f"{path}&after={after}")
                if status == 409 and after:  # the shard of the page before was split meanwhile
                    assert page["error"]["code"] == "layout_changed", page
                    found, after = [], ""
                    continue
                if status != 200:
                    assert status in {429, 503, 504}, page
                    await asyncio.sleep(_AGAIN_S)
                    continue
                found += page["data"]
                after = page["next"]
                if after is None:
                    return found

    def close(self) -> None:
        self.mesh.close()


@pytest.mark.timeout(7200 if PROFILE == "soak" else 300)
async def test_kills_while_a_collection_is_written_searched_split_and_moved(seed: int) -> None:
    """kill -9 of shards' processes, the coordinator among them, and of routers: nothing acknowledged is lost."""
    world = await asyncio.to_thread(World, seed)
    try:
        await asyncio.to_thread(world.start)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as http:
            world.http = http
            made = {
                "name": "kills",
                "model": None,
                "dimension": DIMENSION,
                "shards": 2,
                "replicas": 2,
            }

            async def created() -> bool:
                return (await world.call("POST", "/v1/collections", made))[0] in {201, 409}

            await until(created, "two processes to place on")
            writing = [world.write(writer) for writer in range(WRITERS)]
            await world.amid(world.kill(), *writing, world.read(), world.operate())
            await world.check()
            shards = (await world.call("GET", f"{world.path}/shards"))[1]
            if KILLS >= 100:  # enough of everything happened between the kills
                assert len(shards["data"]) >= MOST_SHARDS
                assert world.moves >= 20
    except BaseException:
        with contextlib.suppress(OSError):
            print(world.mesh.logs())
        raise
    finally:
        await asyncio.to_thread(world.close)
