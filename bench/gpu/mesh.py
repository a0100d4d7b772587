"""The product on an accelerator: an instance by `up`, its embeddings, streams, sessions and search over HTTP.

    python -m bench.gpu.mesh --device cuda --json mesh.json          # on the machine with the accelerator
    python -m bench.gpu.mesh --device cpu --tiny --json tiny.json    # a rehearsal

The chat model is the shipped one, the encoder has MiniLM's shape and random weights made here. Resumable as
`bench.gpu.chat`; the client shares the machine.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from bench.gpu.embeddings import make_model
from bench.gpu.record import Record, arguments
from bench.mesh.proc import free_port

WORDS, TOKENS = 75, 64  # of a text that is embedded, of an answer
REQUESTS, STREAMS = (256, 2000), (1, 8, 32, 64)
BATCHES, BATCH = 24, 256  # requests of many texts
KV_BYTES = 8 << 30
START_S = 180.0

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class GpuInstance:
    """An instance that `spillway up` started; asks it over HTTP, and ends it."""

    def __init__(self, folder: Path, device: str, shape: str) -> None:
        self._folder, self._words = folder, 1000 if shape == "tiny" else 30_522
        self._encoder = folder / f"encoder-{shape}"
        self._encoder.mkdir()
        make_model(self._encoder, shape)
        room = KV_BYTES // 64 if shape == "tiny" else KV_BYTES
        self._env = os.environ | {
            "SPILLWAY_DEVICE": device,
            "SPILLWAY_EMBED_MODEL": str(self._encoder),
            "SPILLWAY_KV_BYTES": str(room),
        }
        self._port = free_port()
        self._draw = random.Random(1)

    def _spillway(self, *words: str) -> str:
        """Run a command of the instance; RuntimeError with what it said if it fails."""
        argv = [sys.executable, "-m", "cli.main", *words, "--data-dir", str(self._folder / "data")]
        done = subprocess.run(
            argv, env=self._env, capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def start(self) -> None:
        """Start it, and return when it is ready."""
        self._spillway("up", "--detach", "--no-sample", "--port", str(self._port))

    def stop(self) -> None:
        """End it."""
        self._spillway("down", "--now")

    @property
    def encoder(self) -> str:
        """Return the name of the encoder."""
        return self._encoder.name

    def text(self, words: int) -> str:
        """Return a text of the encoder's words."""
        return " ".join(f"w{self._draw.randrange(1, self._words)}" for _ in range(words))

    async def asked(self, work: Callable[[Ask], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Do some work with a function that posts a body to a path and returns the answer's."""
        url = f"http://127.0.0.1:{self._port}"
        limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(120)}
        async with aiohttp.ClientSession(**limits) as http:  # type: ignore[arg-type]

            async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
                async with http.post(url + path, json=body) as reply:
                    if reply.status >= 300:
                        raise RuntimeError(f"{path}: {reply.status} {await reply.text()}")
                    if not body.get("stream"):
                        found: dict[str, Any] = await reply.json()
                        return found
                    began = time.perf_counter()
                    moments = [
                        time.perf_counter() - began
                        async for line in reply.content
                        if line.startswith(b"data: {")
                    ]
                    return {"moments": moments}

            return await work(ask)


async def queries(instance: GpuInstance, count: int, ask: Ask) -> dict[str, Any]:
    """Send so many texts at once, a request each: texts/s, and that equal texts get equal vectors."""
    texts = [instance.text(WORDS) for _ in range(count)]
    texts[-1] = texts[0]
    bodies = [
        {"model": instance.encoder, "input": text, "encoding_format": "base64"} for text in texts
    ]
    began = time.perf_counter()
    found = await asyncio.gather(*(ask("/v1/embeddings", body) for body in bodies))
    took = time.perf_counter() - began
    first, last = (
        np.frombuffer(base64.b64decode(each["data"][0]["embedding"]), np.float32)
        for each in (found[0], found[-1])
    )
    cosine = float(first @ last / np.linalg.norm(first) / np.linalg.norm(last))
    return {"texts_per_s": count / took, "cosine_of_equal_texts": cosine}


async def batches(instance: GpuInstance, requests: int, texts: int, ask: Ask) -> dict[str, Any]:
    """Send requests of many texts at once: texts/s."""
    bodies = [
        {
            "model": instance.encoder,
            "input": [instance.text(WORDS) for _ in range(texts)],
            "encoding_format": "base64",
        }
        for _ in range(requests)
    ]
    began = time.perf_counter()
    await asyncio.gather(*(ask("/v1/embeddings", body) for body in bodies))
    return {"texts_per_s": requests * texts / (time.perf_counter() - began)}


async def streams(count: int, ask: Ask) -> dict[str, Any]:
    """Open so many streams at once, twice: tokens/s and each stream's time to its first event."""
    found: dict[str, Any] = {}
    for turn in range(2):  # the first one warms
        bodies = [
            {
                "model": "spillway-demo", "prompt": f"Question {turn} {number}: How do I start it?",
                "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True,
            }
            for number in range(count)
        ]  # fmt: skip
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask("/v1/completions", body) for body in bodies))
        took = time.perf_counter() - began
        first = [answer["moments"][0] for answer in answers]
        found = {"tokens_per_s": count * TOKENS / took, "first_s": first}
    return found


async def turns(ask: Ask) -> dict[str, Any]:
    """Take three turns in a session: how many tokens of each prompt were found in the cache."""
    session = await ask("/v1/sessions", {"model": "spillway-demo"})
    cached = []
    for turn in range(3):
        body = {
            "model": "spillway-demo", "session": session["id"], "temperature": 0, "max_tokens": 40,
            "messages": [{"role": "user", "content": f"Tell me more about queues, number {turn}. " * 4}],
        }  # fmt: skip
        usage = (await ask("/v1/chat/completions", body))["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    return {"cached_tokens": cached}


async def search(instance: GpuInstance, ask: Ask) -> dict[str, Any]:
    """Store documents and search with the text of each: the best hits' scores, 1 where a text finds itself."""
    name = f"gpu-{time.time_ns()}"
    await ask("/v1/collections", {"name": name, "model": instance.encoder})
    documents = [{"id": f"d{number}", "text": instance.text(40)} for number in range(200)]
    stored = await ask(f"/v1/collections/{name}/documents", {"documents": documents})
    told = Counter(each["status"] for each in stored["data"])
    scores = []
    for document in documents[:20]:
        found = await ask(f"/v1/collections/{name}/search", {"text": document["text"], "k": 3})
        scores.append(found["data"][0]["score"])
    return {"stored": told["stored"], "best_scores": scores}


def show(cells: dict[str, Any]) -> None:
    """Print a line a cell."""
    for name, cell in cells.items():
        shown = {
            key: f"{median(value):.4g} (median)" if isinstance(value, list) and len(value) > 3 else value
            for key, value in cell.items()
        }  # fmt: skip
        print(f"{name:16} {json.dumps(shown)}")


def main(argv: list[str] | None = None) -> int:
    """Measure what is not measured yet: 0 done, 3 cells are left for another run."""
    args = arguments(__doc__, argv)
    record = Record(args.json, args.device, args.minutes)
    with tempfile.TemporaryDirectory() as folder:
        instance = GpuInstance(Path(folder), args.device, "tiny" if args.tiny else "minilm")
        singles, many = ((16,), (2, 8)) if args.tiny else (REQUESTS, (BATCHES, BATCH))
        work: dict[str, Callable[[Ask], Awaitable[dict[str, Any]]]] = {
            **{f"queries/{count}": partial(queries, instance, count) for count in singles},
            "batches": partial(batches, instance, *many),
            **{
                f"streams/{count}": partial(streams, count)
                for count in (STREAMS[:2] if args.tiny else STREAMS)
            },
            "turns": turns,
            "search": partial(search, instance),
        }
        if record.wants(*work):
            try:
                began = time.perf_counter()
                instance.start()
                ready_s = time.perf_counter() - began
                record.fill("start", lambda: {"seconds": ready_s})
                for name, call in work.items():
                    record.fill(name, lambda call=call: asyncio.run(instance.asked(call)))  # type: ignore[misc]
            finally:
                instance.stop()
    show(record.cells)
    return record.status()


if __name__ == "__main__":
    sys.exit(main())
