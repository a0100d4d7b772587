"""Splits a collection over the vector_search pods that podman plays, ends pods, and checks what clients were told.

    SPILLWAY_API_KEY=… python scripts/play_shards.py DIRECTORY URL…

Part of scripts/play_kubernetes.sh, whose DIRECTORY holds the pods. While clients write and search, a shard is split, a
process is killed, a pod is replaced by another of its name and volume, and by another of its name with an empty volume.
Each document that was acknowledged must be found by its vector, as the best hit, during all this, and after it from a
pod that was filled anew while one that it was filled from is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from spillway_client import AsyncSpillway, ConflictError, ShardList, SpillwayError

COLLECTION, DIMENSION, SHARDS, REPLICAS = "places", 64, 3, 2
WRITERS, SEARCHERS, EACH = 2, 2, 10  # searchers of each way; documents of a write
PROGRESS = 20  # writes and searches that must succeed after every step
STEP_S = 240.0
NETWORK, HEALTH = "spillway-play", 9464
CALLS = r'^spillway_admitted_total\{lane="search:call"\} (\S+)$'  # searches that went past Redis


def vector(name: str) -> list[float]:
    """Return the vector of a document, the same everywhere."""
    drawn = random.Random(name)
    return [drawn.gauss(0.0, 1.0) for _ in range(DIMENSION)]


def podman(*words: str) -> str:
    """Run podman and return what it prints."""
    done = subprocess.run(["podman", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"podman {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _pid(pod: str) -> int:
    return int(podman("inspect", "--format", "{{.State.Pid}}", f"{pod}-vector-search"))


def _address(pod: str) -> str:
    infra = podman("pod", "inspect", pod, "--format", "{{.InfraContainerID}}")
    place = f'{{{{(index .NetworkSettings.Networks "{NETWORK}").IPAddress}}}}'
    return podman("inspect", infra, "--format", place)


def _metric(address: str, pattern: str) -> float:
    with urllib.request.urlopen(f"http://{address}:{HEALTH}/metrics", timeout=10) as reply:
        return sum(map(float, re.findall(pattern, reply.read().decode(), re.MULTILINE)))


def _is_ready(pod: str) -> bool:
    try:
        url = f"http://{_address(pod)}:{HEALTH}/readyz"
        return bool(urllib.request.urlopen(url, timeout=5).status == HTTPStatus.OK)
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while True:
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.1)


class Clients:
    """Writers and searchers, what they were told, and how often."""

    def __init__(self, client: AsyncSpillway, routers: list[str]) -> None:
        self.client, self.routers = client, routers
        self.tokens: dict[str, str | None] = {}  # of the acknowledged documents
        self.sent = self.writes = self.searches = self.refused = 0
        self.wrong: list[str] = []
        self.ended = False

    async def write(self) -> None:
        """Store documents until the end."""
        while not self.ended:
            first, self.sent = self.sent, self.sent + EACH
            names = [f"place-{number}" for number in range(first, first + EACH)]
            documents = [{"id": name, "vector": vector(name)} for name in names]
            with self.counted():
                written = await self.client.documents(COLLECTION).add(documents)
                self.tokens |= dict.fromkeys(names, written.applied)
                self.writes += 1
            await asyncio.sleep(0.05)

    async def search(self, ask: Callable[[str, str | None], Awaitable[list[str]]]) -> None:
        """Search for acknowledged documents by their vectors until the end."""
        while not self.ended:
            await asyncio.sleep(0.01)
            if not self.tokens:
                continue
            name = random.choice(list(self.tokens))
            with self.counted():
                try:
                    found = await ask(name, self.tokens[name])
                except (
                    ConflictError
                ):  # the token is of a layout that is gone, its write long applied
                    self.tokens[name] = None
                    continue
                self.searches += 1
                if found[:1] != [name]:
                    self.wrong.append(f"{name}: {found}")

    async def by_job(self, name: str, token: str | None) -> list[str]:
        """Return the hits of a search that can be resumed, which goes to vector_search by Redis."""
        found = await self.client.search(COLLECTION, vector=vector(name), k=3, after=token)
        return [hit.id for hit in found.data]

    async def by_call(self, name: str, token: str | None) -> list[str]:
        """Return the hits of a search that cannot, which a router's pod sends to a vector_search's."""
        url = f"{random.choice(self.routers)}/v1/collections/{COLLECTION}/search"
        headers = {"Authorization": f"Bearer {os.environ['SPILLWAY_API_KEY']}"}
        body = {"vector": vector(name), "k": 3, "after": token}
        try:
            async with aiohttp.request("POST", url, json=body, headers=headers) as reply:
                if reply.status == HTTPStatus.OK:
                    return [hit["id"] for hit in (await reply.json())["data"]]
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SpillwayError(str(error)) from error
        if reply.status == HTTPStatus.CONFLICT:
            raise ConflictError(text, status_code=reply.status)
        raise SpillwayError(text)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call that is refused for good, and go on."""
        try:
            yield
        except SpillwayError:
            self.refused += 1

    async def progress(self) -> None:
        """Wait until some more writes and searches have succeeded."""
        writes, searches = self.writes + PROGRESS, self.searches + PROGRESS
        await until(lambda: self.writes >= writes and self.searches >= searches)


def settled(found: ShardList) -> bool:
    """Return whether nothing is missing, and every replica lives and serves."""
    return not found.missing and all(
        one.split is None
        and len(one.replicas) == REPLICAS
        and all(each.alive and each.state == "serving" for each in one.replicas)
        for one in found.data
    )


def places(found: ShardList) -> str:
    """Return who holds which shards."""
    return "; ".join(
        f"{one.shard} on {', '.join(each.name.rpartition('-')[2] for each in one.replicas)}"
        for one in found.data
    )


class Play:
    """The steps, each of which ends when the collection is whole again and clients have gone on."""

    def __init__(self, client: AsyncSpillway, directory: Path, routers: list[str]) -> None:
        self.client, self.clients = client, Clients(client, routers)
        self.directory, self.routers = directory, routers

    async def whole(self) -> ShardList:
        """Wait until the collection is whole."""
        while True:
            with contextlib.suppress(SpillwayError):
                found = await self.client.collections.shards(COLLECTION)
                if settled(found):
                    return found
            await asyncio.sleep(0.2)

    async def step(self, told: str, does: Callable[[], Awaitable[None]]) -> None:
        """Do one thing; print how long it took, and what clients saw of it."""
        clients, began_s = self.clients, time.monotonic()
        before = clients.writes, clients.searches, clients.refused
        async with asyncio.timeout(STEP_S):
            await does()
            found = await self.whole()
            took_s = time.monotonic() - began_s
            await clients.progress()
        after = clients.writes, clients.searches, clients.refused
        writes, searches, refused = (b - a for a, b in zip(before, after, strict=True))
        print(
            f"shards         {told}: whole after {took_s:.1f} s, shards {places(found)}; meanwhile "
            f"{writes} writes, {searches} searches, {refused} refused, {len(clients.wrong)} wrong",
            flush=True,
        )

    async def create(self) -> None:
        """Create the collection."""
        await self.client.collections.create(
            COLLECTION, model=None, dimension=DIMENSION, shards=SHARDS, replicas=REPLICAS
        )

    async def split(self) -> None:
        """Split the shard 0 and wait until its halves have taken its place."""
        await self.client.collections.split_shard(COLLECTION, 0)
        await self.whole()

    async def kill(self) -> None:
        """Kill the process of a pod, as the system does where memory is short; podman starts it again."""
        pod = "vector-search-0"
        pid = _pid(pod)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: _pid(pod) not in {0, pid} and _is_ready(pod))

    async def replace(self, pod: str, *, volume: bool) -> None:
        """End a pod without a word, as the loss of its node does, and start another one of its name."""
        former = _address(pod)
        await self.end(pod)
        if not volume:
            shutil.rmtree(self.directory / pod / "data" / "search")
        await self.clients.progress()  # while the pod is away
        await self.start(pod)
        print(f"               {pod} was at {former}, is at {_address(pod)}", flush=True)

    async def end(self, pod: str) -> None:
        """End a pod, and wait until its shards are known to be without it."""
        await asyncio.to_thread(podman, "pod", "rm", "-f", "-t", "0", pod)
        while True:
            found = await self.client.collections.shards(COLLECTION)
            if not any(
                each.alive for one in found.data for each in one.replicas if each.name == pod
            ):
                return
            await asyncio.sleep(0.2)

    async def start(self, pod: str) -> None:
        """Start a pod, and wait until it is ready."""
        file = self.directory / "pods" / f"{pod}.yaml"
        await asyncio.to_thread(podman, "play", "kube", "--network", NETWORK, str(file))
        await until(lambda: _is_ready(pod))

    async def run(self) -> None:
        """Do everything; SystemExit with a sentence where something does not hold."""
        await self.create()
        await self.whole()
        clients = self.clients
        tasks = [asyncio.create_task(clients.write()) for _ in range(WRITERS)]
        for ask in (clients.by_job, clients.by_call):
            tasks += [asyncio.create_task(clients.search(ask)) for _ in range(SEARCHERS)]
        try:
            await self.step(f"{SHARDS} of {REPLICAS} replicas on three pods", clients.progress)
            await self.step("shard 0 split", self.split)
            await self.step("kill -9 in vector-search-0", self.kill)
            await self.step(
                "vector-search-1 replaced", lambda: self.replace("vector-search-1", volume=True)
            )
            await self.step(
                "vector-search-2 replaced, volume lost",
                lambda: self.replace("vector-search-2", volume=False),
            )
        finally:
            clients.ended = True
            await asyncio.gather(*tasks)
        await self.end("vector-search-0")
        await self.check()
        await self.start("vector-search-0")

    async def check(self) -> None:
        """Look for every acknowledged document by its id and by its vector, without the first pod."""
        clients, client = self.clients, self.client
        there = {each.id async for each in client.documents(COLLECTION).iterate()}
        names = list(clients.tokens)
        lost = [name for name in names if name not in there]
        missed, same, compared = [], 0, 0
        for at in range(0, len(names), 50):
            some = names[at : at + 50]
            vectors = [vector(name) for name in some]
            found = await client.search_many(COLLECTION, vectors=vectors, k=10)
            exact = await client.search_many(COLLECTION, vectors=vectors, k=10, effort="exact")
            for name, near, best in zip(some, found, exact, strict=True):
                if not near.data or near.data[0].id != name:
                    missed.append(name)
                same += len({hit.id for hit in near.data} & {hit.id for hit in best.data})
                compared += len(best.data)
        explained = await client.collections.explain(COLLECTION)
        kinds = ", ".join(f"{one.shard} {one.kind} of {one.live}" for one in explained.shards)
        print(f"without 0      {kinds}")
        print(
            f"without 0      {len(names)} documents acknowledged, {len(lost)} lost, {len(missed)} not the best hit of "
            f"their vector, recall@10 {same / compared:.4f}; {clients.searches} searches, {len(clients.wrong)} wrong"
        )
        calls = sum(_metric(str(urlsplit(each).hostname), CALLS) for each in self.routers)
        print(
            f"shards         {calls:.0f} searches were calls from a router's pod to a vector_search's"
        )
        if lost or missed or clients.wrong or calls < clients.searches / 4:
            raise SystemExit(
                f"lost {lost[:5]}, missed {missed[:5]}, wrong {clients.wrong[:5]}; {calls:.0f} calls"
            )


async def main() -> None:
    """Play with the pods in the directory that the first argument names, through the routers that the others name."""
    directory, *routers = sys.argv[1:]
    async with AsyncSpillway(routers, timeout_s=30) as client:
        await Play(client, Path(directory), routers).run()


if __name__ == "__main__":
    asyncio.run(main())
