"""The requests that F2 and F4 keep in flight: embeddings or chat streams on simulated devices."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import redis.asyncio

from bench.mesh import probe, processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.processes import Service
from loadgen import bodies
from loadgen.bodies import Request
from loadgen.chat.answer import StreamedAnswer as Stream
from loadgen.chat.client import CHAT
from loadgen.chat.frames import Frames
from loadgen.target import TargetAnswer


@dataclass(frozen=True, slots=True)
class Work(abc.ABC):
    """One kind of work: who does it, what asks for it, and what a whole answer is; a step takes `step_s`."""

    step_s: float
    kind: ClassVar[str] = ""

    @abc.abstractmethod
    def worker(self, name: str) -> Service:
        """Describe a worker that does it."""

    @abc.abstractmethod
    def requests(self, count: int, seed: int) -> list[Request]:
        """Build requests of one job each."""

    @abc.abstractmethod
    def flaw(self, answer: TargetAnswer) -> str:
        """Return what cuts an answer of status 200 short, or nothing."""

    @property
    def holding(self) -> tuple[str, ...]:
        """Return how the names of the metrics begin that are 0 when a worker holds nothing for work."""
        return ()


@dataclass(frozen=True, slots=True)
class Embeddings(Work):
    """Batches of `step_s` seconds, requests of `texts` texts."""

    texts: int = 1
    kind: ClassVar[str] = "embed"

    def worker(self, name: str) -> Service:
        """Describe a simulated encoder."""
        return processes.sim_worker(name, beta_s=self.step_s, slo_s=60.0)

    def requests(self, count: int, seed: int) -> list[Request]:
        """Build requests of short texts."""
        return bodies.embed(self.texts, 16, seed=seed, count=count)

    def flaw(self, answer: TargetAnswer) -> str:
        """Return "truncated" unless every vector is there."""
        try:
            return (
                "" if len(msgspec.json.decode(answer.body)["data"]) == self.texts else "truncated"
            )
        except (msgspec.DecodeError, KeyError):
            return "truncated"


@dataclass(frozen=True, slots=True)
class Generations(Work):
    """Streams of `tokens` tokens, one a step of `step_s` seconds; `env` are variables of the worker."""

    tokens: int = 100
    env: Mapping[str, str] = field(default_factory=dict)
    kind: ClassVar[str] = "chat"

    def worker(self, name: str) -> Service:
        """Describe a simulated generator."""
        flags = ("--device", "sim", "--beta", str(self.step_s))
        return processes.chat_worker(name, *flags, **self.env)

    def requests(self, count: int, seed: int) -> list[Request]:
        """Build attached streams of a fixed length."""
        found = []
        for number in range(count):
            message = {"role": "user", "content": f"{bodies.WORDS[seed % 100]} {number}"}
            length = {"max_completion_tokens": self.tokens, "min_tokens": self.tokens}
            body = {"messages": [message], "stream": True, "temperature": 0.0, **length}
            found.append(Request(CHAT, msgspec.json.encode(body), 1))
        return found

    def flaw(self, answer: TargetAnswer) -> str:
        """Return the error in the stream, or "truncated" unless it has its finish and its end."""
        streamed = Stream()
        for frame in Frames().feed(answer.body):
            streamed.take(frame, 0.0)
        if streamed.code:
            return streamed.code
        whole = streamed.done and streamed.finish == {0: "length"} and not streamed.wrong
        return "" if whole else "truncated"

    @property
    def holding(self) -> tuple[str, ...]:
        """Return the metrics of pages in use and of sequences running or waiting."""
        return HOLDING


HOLDING = (
    'spillway_pages{state="used"',
    "spillway_running_sequences",
    "spillway_waiting_sequences",
)


async def held(mesh: LocalMesh, name: str, work: Work) -> dict[str, float]:
    """Return what the named worker holds for work, by metric; empty if nothing."""
    if not work.holding:
        return {}
    found = await probe.metrics(mesh.health_port(name) or 0)
    return {key: value for key, value in found.items() if value and key.startswith(work.holding)}


async def admitted(mesh: LocalMesh, kind: str) -> int:
    """Return how many jobs of a kind the bus has admitted since the mesh began."""
    client = redis.asyncio.from_url(mesh.redis_url, decode_responses=True)
    try:
        keys = [key async for key in client.scan_iter(match=f"{{{kind}.*:use", count=1000)]
        return sum([int(await client.hget(key, "admits") or 0) for key in keys])
    finally:
        await client.aclose()
