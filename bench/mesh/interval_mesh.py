"""Grounded answers over HTTP whose passages are found anew at intervals, by a mesh with a core for generation alone.

The generator has one core. Router, encoder, search and Redis share the other one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import aiohttp
from spillway_client import AsyncSpillway

from bench.gpu import shapes
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.mesh_stack import settled
from models.demo.world import handbook

COLLECTION = "handbook"
LISTED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "grounding.jinja")
ASKED = 4000  # questions, most of them different
_TIMEOUT_S = 300.0


class TimedAnswer(NamedTuple):
    """Seconds of an answer, from the request's first byte to the response's last, and of its parts.

    `first_s` are those until its first chunk was written, `chunks_s` those of the chunks after the first one, and
    `searches_s` those of the retrievals between them. Only the parts of a sequential answer add up to the whole.
    """

    seconds: float
    first_s: float
    chunks_s: list[float]
    searches_s: list[float]


@dataclass(frozen=True, slots=True)
class IntervalMesh:
    """A running mesh with the handbook, and questions that it answers, none of which it was asked before.

    A question asked again would find its pages: the side that comes second would have less to compute.
    """

    mesh: LocalMesh
    http: aiohttp.ClientSession
    questions: Iterator[str]

    async def answer(self, chunks: int, interval: int, *, pipelined: bool) -> TimedAnswer:
        """Return the times of the next question's answer; RuntimeError if it has not made all its retrievals.

        Passages lose none of their tokens, so that both sides read as many.
        """
        body = {
            "messages": [{"role": "user", "content": next(self.questions)}],
            "retrieval": {
                "collection": COLLECTION, "k": 2, "effort": "exact",
                "interval": interval, "stale": pipelined, "late": "wait", "shift": 0,
            },
            "temperature": 0, "max_tokens": chunks * interval, "ignore_eos": True,
        }  # fmt: skip
        began_s = time.perf_counter()
        async with self.http.post(f"{self.mesh.url}/v1/chat/completions", json=body) as response:
            told = await response.json()
        seconds = time.perf_counter() - began_s
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {json.dumps(told)[:300]}")
        made = told["retrieval"]["retrievals"][1:]
        if len(made) != chunks - 1:
            raise RuntimeError(f"{len(made)} retrievals of an answer; expected {chunks - 1}")
        spans = [(each["stages"][0]["start_ms"], each["stages"][-1]["end_ms"]) for each in made]
        ends_ms = [*(start for start, _ in spans[1:]), 1000 * seconds]
        return TimedAnswer(
            seconds,
            spans[0][0] / 1000,
            [(end - start) / 1000 for end, (_, start) in zip(ends_ms, spans, strict=True)],
            [each["ms"] / 1000 for each in made],
        )


@contextlib.asynccontextmanager
async def interval_mesh(
    model: tuple[str, str], folder: Path, cores: Sequence[int]
) -> AsyncIterator[IntervalMesh]:
    """Run a mesh with a chat model on the first core, the handbook stored and indexed."""
    path, kind = model
    own, other = cores
    worker = processes.chat_worker(
        "gpu_worker", "--device", "cpu", model=path, dtype=kind, EMBED_MODEL="none", THREADS="1"
    )
    encoder = replace(processes.gpu_worker("encoder"), env={"SPILLWAY_THREADS": "1"})
    services = [
        processes.pinned(worker, own),
        *(processes.pinned(each, other) for each in (
            processes.router(), encoder, processes.vector_search(), processes.kv_store()
        )),
    ]  # fmt: skip
    async with (
        LocalMesh(folder, services) as mesh,
        AsyncSpillway(mesh.url, timeout_s=_TIMEOUT_S) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http,
    ):
        await client.collections.create(COLLECTION)
        pages = [{"id": page.name, "text": page.text} for page in handbook.pages()]
        await client.documents(COLLECTION).add(pages)
        await settled(client, collection=COLLECTION)
        questions = dict.fromkeys(each.text for each in handbook.questions(ASKED))
        yield IntervalMesh(mesh, http, iter(questions))


def spoken(name: str, folder: Path) -> str:
    """Return a model of a known shape, random, that speaks the shipped model's tokens and chats; made if not there."""
    if not (folder / LISTED[-1]).exists():
        words = json.loads((processes.DEMO / "config.json").read_text())["vocab_size"]
        shapes.write(folder, shapes.SHAPES[name] | {"vocab_size": words}, "cpu")
        for each in LISTED:
            shutil.copy(processes.DEMO / each, folder / each)
    return str(folder)
