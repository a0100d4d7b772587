"""The kinds of requests sent while processes die, and how each answer is judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from spillway_client import AsyncSpillway

from chaos.clients import Clients, Done
from loadgen import bodies

# Another batch is another summation order: E1's accuracy is what two right answers may differ by.
COSINE = 0.9995
SCORE = 2e-3
DIMENSION = 32
Rows = np.ndarray[Any, np.dtype[np.float32]]


class Kind(Protocol):
    """One kind of request: prepared without faults, asked under faults, checked at the end."""

    name: ClassVar[str]

    async def prepare(self, clients: Clients) -> None:
        """Store what is needed and remember the undisturbed answers."""

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Do one operation; return "ok", or what is wrong with its answer."""

    async def audit(self, clients: Clients) -> list[str]:
        """Compare all that was promised with what is there; return what is wrong."""


def rows(vectors: list[bytes]) -> Rows:
    """Stack float32 rows of an answer."""
    return np.stack([np.frombuffer(vector, "<f4") for vector in vectors])


@dataclass
class Embed:
    """Embeddings of a few texts out of a pool, compared with the pool's undisturbed vectors."""

    name: ClassVar[str] = "embed"
    texts: int = 4
    pool: list[str] = field(default_factory=list)
    known: Rows | None = None
    kept: dict[str, tuple[list[str], list[bytes]]] = field(default_factory=dict)

    async def prepare(self, clients: Clients) -> None:
        """Embed the whole pool once."""
        rng = random.Random(11)
        self.pool = [bodies.text(rng.choice((6, 16, 40, 96)), rng) for _ in range(64)]
        found = await clients.first.embeddings.create(self.pool, as_="bytes")
        self.known = rows(found.vectors)

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Embed texts of the pool; every vector must be the known one, in the order asked."""
        picked = random.Random(number).choices(range(len(self.pool)), k=self.texts)
        texts = [self.pool[i] for i in picked]

        async def create(client: AsyncSpillway, key: str) -> list[bytes]:
            return (await client.embeddings.create(texts, as_="bytes", idempotency_key=key)).vectors

        found = await clients.ask(create, done)
        self.kept[done.key] = (texts, found)
        if len(self.kept) > 30:
            self.kept.pop(next(iter(self.kept)))
        return self._judge(found, picked)

    def _judge(self, found: list[bytes], picked: list[int]) -> str:
        assert self.known is not None
        if len(found) != len(picked):
            return f"{len(found)} vectors for {len(picked)} texts"
        ours, known = rows(found), self.known[picked]
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(known, axis=1)
        cosines = (ours * known).sum(axis=1) / norms
        return "ok" if cosines.min() >= COSINE else f"cosine {cosines.min():.6f} to the known one"

    async def audit(self, clients: Clients) -> list[str]:
        """Ask the last ones again with their keys: the stored answers, byte by byte."""
        wrong = []
        for key, (texts, before) in self.kept.items():
            again = await clients.first.embeddings.create(texts, as_="bytes", idempotency_key=key)
            if again.vectors != before:
                wrong.append(f"{self.name}: key {key} gives another answer the second time")
        return wrong


@dataclass
class Parcels(Embed):
    """Embedding requests of several jobs, which another router goes on with when theirs dies."""

    name: ClassVar[str] = "parcels"
    texts: int = 70


@dataclass
class Search:
    """Vector searches in a collection that does not change: hits must be the undisturbed ones."""

    name: ClassVar[str] = "search"
    collection: ClassVar[str] = "f1-vectors"
    queries: Rows | None = None
    known: list[list[tuple[str, float]]] = field(default_factory=list)

    async def prepare(self, clients: Clients) -> None:
        """Store 1,000 vectors and remember the hits of 32 queries."""
        rng = np.random.default_rng(5)
        stored = rng.standard_normal((1000, DIMENSION)).astype(np.float32)
        self.queries = rng.standard_normal((32, DIMENSION)).astype(np.float32)
        client = clients.first
        await client.collections.create(self.collection, dimension=DIMENSION, model=None)
        added = [{"id": f"v{i}", "vector": row.tolist()} for i, row in enumerate(stored)]
        written = await client.documents(self.collection).add(added)
        for query in self.queries:
            found = await client.search(
                self.collection, vector=query.tolist(), after=written.applied
            )
            self.known.append([(hit.id, hit.score) for hit in found.data])

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Search with one of the queries; ids in order and scores must be the known ones."""
        assert self.queries is not None
        picked = number % len(self.queries)
        query = self.queries[picked].tolist()

        async def search(client: AsyncSpillway, _key: str) -> list[tuple[str, float]]:
            found = await client.search(self.collection, vector=query)
            return [(hit.id, hit.score) for hit in found.data]

        return same_hits(await clients.ask(search, done), self.known[picked])

    async def audit(self, clients: Clients) -> list[str]:
        """Search with every query once more."""
        wrong = []
        for i in range(len(self.known)):
            verdict = await self.once(clients, i, Done(self.name, f"audit-{i}", 0.0))
            wrong += [f"{self.name}: query {i}: {verdict}"] if verdict != "ok" else []
        return wrong


def same_hits(found: list[tuple[str, float]], known: list[tuple[str, float]]) -> str:
    """Say "ok" if both have the same ids with the same scores; ids of equal scores may swap."""
    if len(found) != len(known):
        return f"{len(found)} hits, {len(known)} expected"
    for (ident, score), (other, expected) in zip(found, known, strict=True):
        if abs(score - expected) > SCORE:
            return f"score {score:.5f} of {ident}, expected {expected:.5f} of {other}"
    near = known[-1][1] + SCORE
    sure = {ident for ident, score in known if score > near}
    missing = sure - {ident for ident, _ in found}
    return f"missing {sorted(missing)}" if missing else "ok"


@dataclass
class Ingest:
    """Documents stored, replaced and deleted; at the end each is there exactly once, or gone."""

    name: ClassVar[str] = "ingest"
    collection: ClassVar[str] = "f1-documents"
    expected: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    async def prepare(self, clients: Clients) -> None:
        """Create the collection of the default encoder."""
        await clients.first.collections.create(self.collection)

    async def once(self, clients: Clients, number: int, done: Done) -> str:
        """Store two new documents; every fourth time replace one and delete the other."""
        rng = random.Random(number)
        texts = {f"d{number}-{i}": bodies.text(24, rng) for i in range(2)}
        verdict = await self._store(clients, texts, done)
        if number % 4 == 0 and verdict == "ok":
            first, second = texts
            again = Done(self.name, f"{done.key}-replace", done.sent_s)
            verdict = await self._store(clients, {first: bodies.text(30, rng)}, again)
            await self._delete(clients, second, Done(self.name, f"{done.key}-delete", done.sent_s))
        return verdict

    async def _store(self, clients: Clients, texts: dict[str, str], done: Done) -> str:
        documents = [{"id": i, "text": text, "metadata": {"n": i}} for i, text in texts.items()]

        async def add(client: AsyncSpillway, key: str) -> list[str]:
            written = await client.documents(self.collection).add(documents, idempotency_key=key)
            return [document.id for document in written.data]

        found = await clients.ask(add, done)
        self.expected |= texts
        return "ok" if found == list(texts) else f"stored {found}, asked for {list(texts)}"

    async def _delete(self, clients: Clients, ident: str, done: Done) -> None:
        async def delete(client: AsyncSpillway, _key: str) -> int:
            return (await client.documents(self.collection).delete(ident)).deleted

        await clients.ask(delete, done)
        self.expected.pop(ident)
        self.gone.add(ident)

    async def audit(self, clients: Clients) -> list[str]:
        """List the collection: what was answered is there exactly once with its text, nothing deleted is."""
        seen: dict[str, str | None] = {}
        wrong = []
        async for document in clients.first.documents(self.collection).iterate(include=["text"]):
            if document.id in seen:
                wrong.append(f"ingest: {document.id} is there twice")
            seen[document.id] = document.text
        for ident, text in self.expected.items():
            if ident not in seen:
                wrong.append(f"ingest: {ident} is lost")
            elif seen[ident] != text:
                wrong.append(f"ingest: {ident} has another text")
        wrong += [f"ingest: {ident} was deleted and is there" for ident in self.gone & set(seen)]
        return wrong + await self._findable(clients)

    async def _findable(self, clients: Clients) -> list[str]:
        sample = random.Random(3).sample(sorted(self.expected), min(20, len(self.expected)))
        wrong = []
        for ident in sample:
            found = await clients.first.search(self.collection, self.expected[ident], k=1)
            if not found.data or found.data[0].id != ident:
                wrong.append(f"ingest: {ident} is not found by its own text")
        return wrong
