"""Times of the stages of a retrieval-augmented answer, measured through a running mesh by batch size."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from spillway_client import AsyncSpillway

from planner.inventory import ProfilePoint
from planner.rag_schema import StageName

_WORDS = (
    "water", "dam", "river", "gate", "flood", "level", "stone", "spring", "valley", "bridge", "stream",
    "pressure", "turbine", "channel", "season", "rain", "storm", "basin", "wall", "crest", "tower", "pipe",
    "pump", "lake", "weir", "flow", "bank", "mill", "lock", "sluice", "ridge", "delta",
)  # fmt: skip
_DIMENSION = 384
_PART = 250  # vectors stored by one request
_FEWEST = 2  # least number of runs of each batch
Batch = Callable[[int], Awaitable[float]]


class StageLoad(NamedTuple):
    """The measured load: tokens of a question, of a prompt and of an answer; texts to rerank (0: no rerank)."""

    question_tokens: int = 16
    prompt_tokens: int = 512
    answer_tokens: int = 32
    reranked: int = 0


class StageTimer:
    """Measures stages by requests to one mesh; each point takes `seconds`, or two batches if these take longer."""

    def __init__(
        self,
        client: AsyncSpillway,
        load: StageLoad,
        *,
        collection: str,
        seconds: float,
        seed: int = 1,
    ) -> None:
        self._client, self._load, self._collection = client, load, collection
        self._seconds, self._draw = seconds, random.Random(seed)
        self._tokens_of_word, self._dimension = 1.5, _DIMENSION

    async def points(
        self, units: int, batches: tuple[int, ...], *, generates: bool = True
    ) -> list[ProfilePoint]:
        """Return one point for each stage and batch size, of a mesh whose workers compute with `units` threads.

        Without `generates` the mesh has no chat model; `retrieval` counts as one unit, for any number of threads.
        """
        found = [await self._point("embed", units, batch, self._embed) for batch in batches]
        found += [await self._point("retrieval", 1, batch, self._search) for batch in batches]
        if self._load.reranked:
            found += [await self._point("rerank", units, batch, self._rerank) for batch in batches]
        if generates:
            await self._learn_words()
            found += [await self._point("prefix", units, batch, self._read) for batch in batches]
            found += [await self._point("decode", units, batch, self._write) for batch in batches]
        return found

    async def _point(self, stage: StageName, units: int, batch: int, run: Batch) -> ProfilePoint:
        """Return a batch's median seconds and rate; for decode the seconds of one token, and the rate of answers."""
        await run(batch)  # not measured: the first use
        taken: list[float] = []
        until = time.monotonic() + self._seconds
        while len(taken) < _FEWEST or time.monotonic() < until:
            taken.append(await run(batch))
        latency_s = statistics.median(taken)
        tokens = self._load.answer_tokens if stage == "decode" else 1
        return ProfilePoint(stage, units, batch, latency_s, batch / (latency_s * tokens))

    # -- batches: each returns its seconds ---------------------------------------------------------

    async def _embed(self, batch: int) -> float:
        texts = [self._text(self._load.question_tokens) for _ in range(batch)]
        return await _timed(self._client.embeddings.create(texts, as_="bytes"))

    async def _search(self, batch: int) -> float:
        vectors = [self._vector() for _ in range(batch)]
        return await _timed(
            self._client.search_many(self._collection, vectors=vectors, k=5, include_text=False)
        )

    async def _rerank(self, batch: int) -> float:
        texts = [self._text(self._load.question_tokens) for _ in range(self._load.reranked)]

        async def one() -> None:
            await self._client.rerank(self._text(self._load.question_tokens), texts)

        return await _timed(asyncio.gather(*(one() for _ in range(batch))))

    async def _read(self, batch: int) -> float:
        async def one() -> None:
            await self._client.completions.create(
                self._text(self._load.prompt_tokens), max_tokens=1, temperature=0.0
            )

        return await _timed(asyncio.gather(*(one() for _ in range(batch))))

    async def _write(self, batch: int) -> float:
        tokens = max(2, self._load.answer_tokens)
        seconds: list[float] = []

        async def one() -> None:
            stream = await self._client.completions.stream(
                self._text(8), max_tokens=tokens, min_tokens=tokens, temperature=0.0
            )
            first = last = 0.0
            async for _ in stream:
                last = time.monotonic()
                first = first or last
            seconds.append(max(last - first, 1e-6) / (tokens - 1))

        await asyncio.gather(*(one() for _ in range(batch)))
        return statistics.mean(seconds)

    # -- texts -------------------------------------------------------------------------------------

    def _text(self, tokens: int) -> str:
        words = max(1, round(tokens / self._tokens_of_word))
        return " ".join(self._draw.choice(_WORDS) for _ in range(words))

    def _vector(self) -> list[float]:
        return [self._draw.gauss(0, 1) for _ in range(self._dimension)]

    async def _learn_words(self) -> None:
        """Measure the average number of the chat model's tokens per word."""
        words = 100
        text = " ".join(self._draw.choice(_WORDS) for _ in range(words))
        answer = await self._client.completions.create(text, max_tokens=1)
        if answer.usage is not None and answer.usage.prompt_tokens:
            self._tokens_of_word = answer.usage.prompt_tokens / words

    async def prepare(self, vectors: int) -> None:
        """Fill the collection with `vectors` random vectors (0: it is the user's own, and is not changed)."""
        if not vectors:
            found = await self._client.collections.get(self._collection)
            self._dimension = found.dimension
            return
        await self._client.collections.create(self._collection, model=None, dimension=_DIMENSION)
        for start in range(0, vectors, _PART):
            part = [
                {"id": f"v{number}", "vector": self._vector()}
                for number in range(start, min(start + _PART, vectors))
            ]
            await self._client.documents(self._collection).add(part)


async def _timed(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began
