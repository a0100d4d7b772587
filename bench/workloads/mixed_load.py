"""The product's own load: chat, embeddings, search and ingest at once in an open loop, with an objective for each.

Objectives and shape were fixed before anything was measured with them. Whoever changes one measures both sides anew.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from bench.workloads import vectors
from bench.workloads.streamed_batch import BatchError, prompts, run_batch
from bench.workloads.turns import System
from bench.workloads.vectors import Ids, Rows
from loadgen import arrivals
from loadgen.loop import LoadLoop

CHAT, EMBED, SEARCH, INGEST = "chat", "embeddings", "search", "ingest"
KINDS = (CHAT, EMBED, SEARCH, INGEST)


@dataclass(frozen=True, slots=True)
class Objectives:
    """The most seconds from when a request was due: to a chat's first token, to vectors, to hits, to stored documents.

    `token_s` is the mean time of a chat's later tokens. Ingest runs behind the rest, but must keep up.
    """

    first_s: float = 1.0
    token_s: float = 0.1
    embed_s: float = 1.0
    search_s: float = 0.2
    ingest_s: float = 10.0


@dataclass(frozen=True, slots=True)
class MixShape:
    """What arrives at a load factor of 1: requests a second of each kind, and their sizes.

    Chat, embeddings and search arrive as Poisson processes of their own, ingest steadily. A chat is a prompt of random
    tokens that no server has seen, with a length drawn evenly, greedy; so is the number of its new tokens. A text is a
    piece of a docstring of Python's standard library: at most 160 characters, some 35 tokens. A search embeds one text
    and finds the `k` nearest of `rows` stored pieces, with their texts. An ingest stores `documents` new ones.
    """

    per_s: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({CHAT: 0.5, EMBED: 2.0, SEARCH: 10.0, INGEST: 1.0})
    )
    prompt_tokens: tuple[int, int] = (64, 256)
    new_tokens: tuple[int, int] = (32, 96)
    texts: int = 16
    k: int = 10
    rows: int = 10_000
    documents: int = 8


OBJECTIVES, SHAPE = Objectives(), MixShape()


GIVE_UP_S = 15.0  # longer than any objective: who has no answer by then has none
QUERIES = 1000  # pieces that are asked for, and not stored


class StoredText(NamedTuple):
    """A text to store under an id."""

    id: str
    text: str


class StackError(Exception):
    """A request was refused or failed; the message is a short code."""


class Stack(Protocol):
    """A product that answers all four kinds; `system` takes its chats. Each call raises StackError if it fails.

    `pids` are the processes to stop for it to stand still.
    """

    @property
    def system(self) -> System:
        """The chat server."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes to stop."""

    async def embed(self, texts: Sequence[str]) -> None:
        """Embed texts."""

    async def search(self, text: str, k: int) -> list[str]:
        """Return the ids of the `k` nearest stored texts, best first."""

    async def ingest(self, documents: Sequence[StoredText]) -> None:
        """Store documents; return when they are on disk and can be found."""

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove documents."""


class TextCorpus(NamedTuple):
    """Pieces of docstrings: stored ones with their vectors, queries with the true nearest stored, and fresh ones."""

    stored: list[StoredText]
    vectors: Rows
    queries: list[str]
    truth: Ids
    fresh: list[str]


def corpus(rows: int, limit: int, cache: Path, k: int = SHAPE.k) -> TextCorpus:
    """Return `rows` pieces to store, drawn from `limit` of them at most, and the rest; embeddings lie in `cache`."""
    texts, found = vectors.docstrings(limit), vectors.real(limit, cache)
    order = random.Random(0).sample(range(len(texts)), len(texts))
    asked = min(QUERIES, (len(texts) - rows) // 2)
    if asked < k:
        raise ValueError(f"{len(texts)} pieces; expected more than {rows + 2 * k}")
    some, queries, fresh = order[:rows], order[rows : rows + asked], order[rows + asked :]
    stored = [StoredText(f"piece-{number}", texts[at]) for number, at in enumerate(some)]
    truth = vectors.nearest(found[some], found[queries], k)
    return TextCorpus(
        stored, found[some], [texts[at] for at in queries], truth, [texts[at] for at in fresh]
    )


class Timing(NamedTuple):
    """Seconds of a chat from when it was sent: to its first token, and of each later one."""

    first_s: float = 0.0
    token_s: float = 0.0


class Served(msgspec.Struct, frozen=True, array_like=True):
    """One request, in seconds: when it was due, until it was answered, a chat's tokens; `code` says why it failed."""

    due_s: float
    latency_s: float
    first_s: float = 0.0
    token_s: float = 0.0
    code: str = ""


class Hold(msgspec.Struct, frozen=True):
    """A load factor held for a time: every request by kind, and the client's own CPU seconds."""

    kinds: dict[str, list[Served]]
    cpu_s: float

    def counts(self, warm_s: float, objectives: Objectives = OBJECTIVES) -> dict[str, Counted]:
        """Return of each kind how many requests, due after `warm_s`, there were, and how many met their objective."""
        found = {}
        for kind, some in self.kinds.items():
            due = [each for each in some if each.due_s >= warm_s]
            found[kind] = Counted(len(due), sum(meets(kind, each, objectives) for each in due))
        return found


class Counted(NamedTuple):
    """How many requests there were, and how many of them met their objective."""

    asked: int
    met: int


def meets(kind: str, served: Served, objectives: Objectives = OBJECTIVES) -> bool:
    """Return whether a request was answered within the objective of its kind."""
    if served.code:
        return False
    if kind == CHAT:
        return served.first_s <= objectives.first_s and served.token_s <= objectives.token_s
    limits = {
        EMBED: objectives.embed_s, SEARCH: objectives.search_s, INGEST: objectives.ingest_s,
    }  # fmt: skip
    return served.latency_s <= limits[kind]


@dataclass(slots=True)
class KindRun:
    """What the loop of one kind did; `cpu_s` are those of the whole client."""

    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0


class KindLoop(LoadLoop[KindRun]):
    """Sends the requests of one kind; `ask` is given the number of the request."""

    def __init__(self, ask: Callable[[int], Awaitable[Timing]]) -> None:
        super().__init__(KindRun())
        self._ask, self._numbers = ask, itertools.count()

    def fresh(self) -> KindRun:
        """Return a run that has done nothing."""
        return KindRun()

    def full(self, due: float, now: float) -> None:
        """Record a request that found too many open."""
        self.run.served.append(Served(due, now - due, code="loadgen_full"))

    async def one(self, due: float) -> None:
        """Send the next request; record when it was answered, counted from when it was due."""
        late, times, code = self.now() - due, Timing(), ""
        try:
            async with asyncio.timeout(GIVE_UP_S):
                times = await self._ask(next(self._numbers))
        except TimeoutError:
            code = "timeout"
        except (StackError, BatchError) as error:
            code = str(error)[:120]
        latency = self.now() - due
        self.run.served.append(Served(due, latency, times.first_s + late, times.token_s, code))


class MixedLoad:
    """The four kinds against one product, with requests that are the same for the same seed and factor."""

    def __init__(self, stack: Stack, found: TextCorpus, shape: MixShape = SHAPE) -> None:
        self._stack, self._corpus, self._shape = stack, found, shape
        self._woken = itertools.count()

    async def hold(self, factor: float, seconds: float, seed: int) -> Hold:
        """Send everything that is due within `seconds`, wait for every end, then remove what was ingested."""
        name = f"{seed}-{factor:g}"
        asks: dict[str, Callable[[str, int], Awaitable[Timing]]] = {
            CHAT: self._chat, EMBED: self._embed, SEARCH: self._search, INGEST: self._ingest,
        }  # fmt: skip
        loops = {kind: KindLoop(partial(asks[kind], name)) for kind in KINDS}
        times = due(factor, name, self._shape)
        runs = await asyncio.gather(*(loops[kind].open(times[kind], seconds) for kind in KINDS))
        count = len(runs[KINDS.index(INGEST)].served)
        await self._stack.remove(
            [each.id for number in range(count) for each in self._documents(name, number)]
        )
        kinds = {kind: run.served for kind, run in zip(KINDS, runs, strict=True)}
        return Hold(kinds, max(run.cpu_s for run in runs))

    def once(self) -> list[Callable[[], Awaitable[Timing]]]:
        """Return one request of each kind that leaves nothing behind."""
        asks = (self._chat, self._embed, self._search)
        return [partial(ask, "wake", next(self._woken)) for ask in asks]

    async def _chat(self, name: str, number: int) -> Timing:
        draw = random.Random(f"{name} chat {number}")
        length, wanted = (
            draw.randint(*r) for r in (self._shape.prompt_tokens, self._shape.new_tokens)
        )
        system = self._stack.system
        asked = prompts(1, length, system.vocabulary, f"{name} prompt {number}")
        (stream,) = await run_batch(system, asked, wanted)
        return Timing(stream.first_s, stream.token_s)

    async def _embed(self, name: str, number: int) -> Timing:
        some = self._corpus.stored
        texts = random.Random(f"{name} embed {number}").sample(some, self._shape.texts)
        await self._stack.embed([each.text for each in texts])
        return Timing()

    async def _search(self, name: str, number: int) -> Timing:
        query = random.Random(f"{name} search {number}").choice(self._corpus.queries)
        found = await self._stack.search(query, self._shape.k)
        if len(found) != self._shape.k:
            raise StackError(f"{len(found)} hits")
        return Timing()

    async def _ingest(self, name: str, number: int) -> Timing:
        await self._stack.ingest(self._documents(name, number))
        return Timing()

    def _documents(self, name: str, number: int) -> list[StoredText]:
        count, fresh = self._shape.documents, self._corpus.fresh
        places = range(number * count, (number + 1) * count)
        return [StoredText(f"new-{name}-{at}", f"{fresh[at % len(fresh)]} ({at})") for at in places]


def due(factor: float, name: str, shape: MixShape = SHAPE) -> dict[str, Iterator[float]]:
    """Return the arrivals of every kind at a load factor, in seconds; the same for the same name."""
    found = {}
    for kind in KINDS:
        rate = factor * shape.per_s[kind]
        draw = random.Random(f"{name} {kind}")
        found[kind] = arrivals.steady(rate) if kind == INGEST else arrivals.poisson(rate, draw)
    return found
