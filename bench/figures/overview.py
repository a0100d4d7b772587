"""The page a buyer reads, docs/benchmarks.md: one line a row, in sections, the product's own case first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.figures.figure import Figure, Found, lowest
from loadgen.machine import described

COLUMNS = (
    "row", "what", "model", "against", "how", "the part that came out worst", "reached in all parts", "measured",
    "command",
)  # fmt: skip
HTTP, PROCESS = "over HTTP", "in process"


class Line(NamedTuple):
    """One row as a buyer reads of it: what was asked, of which model, against whom, and where it was measured."""

    row: str
    what: str
    model: str
    against: str
    how: str


_ENCODER, _SHIPPED, _SIM = "MiniLM-L6-v2", "S", "simulated devices"
_ITSELF = "its own levels"
_LARGE, _BOTH = "L; bf16, int8, int4", "llama.cpp, vLLM on CPU"
SECTIONS: dict[str, tuple[Line, ...]] = {
    "product": (
        Line(
            "H2", "chat, embeddings, search and ingest at once: requests/s within their objectives",
            "M bf16, MiniLM-L6-v2", "llama.cpp's server + infinity + pgvector", HTTP,
        ),
    ),
    "felt": (
        Line(
            "H1", "chat, 1, 8 and 32 streams: tokens/s, first token, later tokens, gaps", "L, M, S; bf16, int8, int4",
            "llama.cpp's server, vLLM on CPU", HTTP,
        ),
        Line(
            "P1", "conversations of several turns: turns/s at equal latency", "S, M; bf16",
            "itself without state, llama.cpp, vLLM on CPU", HTTP,
        ),
        Line("P2", "first token of a turn whose history is kept", "S, M, L; bf16", "computing it again", PROCESS),
        Line("T1", "one generated token taken apart", "M, L", _ITSELF, HTTP),
        Line("C1", "chat in an open loop", _SHIPPED, _ITSELF, HTTP),
        Line("Q1", "answers from a collection", _SHIPPED, _ITSELF, HTTP),
        Line("Q2", "follow-ups: pages found by rewriting and reranking, and their cost", _ENCODER, _ITSELF, HTTP),
    ),
    "embeddings": (
        Line(
            "E1", "texts/s, and cosine to fp32", _ENCODER,
            "sentence-transformers (in process), infinity, ONNX Runtime, OpenVINO (HTTP)", "in process and over HTTP",
        ),
        Line("E2", "the whole mesh against its own engine", _ENCODER, "our engine in process", HTTP),
        Line("W1", "depth of a device found by probes", _SIM, "the paper's table", "through the mesh"),
        Line("W2", "predicted depth against trying all", _ENCODER, "exhaustive search", "through the mesh"),
        Line(
            "W3", "bursts of mixed lengths: late texts, texts in time", f"{_SIM}, {_ENCODER}",
            "other admission rules, a clairvoyant", "virtual clock, and over HTTP",
        ),
    ),
    "search": (
        Line("V1", "queries/s at recall@10 of 0.95", "vectors of 96 to 1,024",
             "hnswlib, faiss, usearch, svs (in process), pgvector, Chroma, LanceDB, Milvus Lite (servers)",
             "in process and over HTTP"),
        Line(
            "V1W", "search beside a writer, after churn, after a cold start, within time budgets",
            "vectors of 96 and 128", _ITSELF, HTTP,
        ),
        Line("V1M", "four shards in memory cgroups: what they serve within", "vectors of 1,024", _ITSELF, HTTP),
        Line("V1L", "kinds of index beside their memory; scans of codes", "vectors of 128", "faiss", PROCESS),
        Line("V5", "an index tuned for a goal: predicted and measured", "vectors of 96 and 128", _ITSELF, PROCESS),
        Line(
            "V6", "a collection larger than memory, in inverted lists, while rows are added", "vectors of 128",
            "an exact scan", HTTP,
        ),
        Line("V2", "filtered search returns k whenever k match", "vectors of 96", _ITSELF, HTTP),
        Line(
            "V3", "delayed-synchronization traversal of the graph", "vectors of 96", "best-first search, the thesis",
            "simulated, and in process",
        ),
        Line(
            "V4", "approximate queues: answers like an exact selection's, and CPU time",
            "synthetic lists, vectors of 384", "exact selections, the thesis", PROCESS,
        ),
        Line("V4R", "the ratio of generating to retrieving units", "-", "a simulation, the thesis", "simulated"),
        Line(
            "G2", "deployments planned: placement, allocation, batches", "8B, 70B (rooflines)",
            "brute force, the thesis", "simulated",
        ),
        Line(
            "G2M", "deployments drawn from the planner's candidates: capacity and first token as predicted",
            "42M random", "-", HTTP,
        ),
    ),
    "engine": (
        Line("L1", "decode, one stream: tokens/s, share of the memory's bandwidth", _LARGE, _BOTH, PROCESS),
        Line("L2", "decode, 8 and 32 streams at 64 and 2k tokens: tokens/s", _LARGE, _BOTH, PROCESS),
        Line("L3", "prompts: tokens/s, share of the GEMM peak", _LARGE, _BOTH, PROCESS),
        Line("L4", "paged attention: share of the memory's bandwidth", "shapes of M and L", "torch", PROCESS),
        Line("L5", "decode and prompts beside other engines", "L, M", "transformers, CTranslate2, vLLM", PROCESS),
        Line("L6", "decode of every family: bytes of weights a second", "M", "Llama at the same sizes", PROCESS),
        Line("K1", "linear layers", "matrices of M and L", "torch, oneDNN", PROCESS),
        Line("N1", "attention on the host: requests/s", "M, pages for 4, 8, 32 sequences", "the device alone", PROCESS),
        Line("N1S", "attention on the host: throughput and latency", "8B, 7B, 70B (rooflines)", "the device alone",
             "simulated"),
        Line("N2", "prediction of a step's time", "S, M", _ITSELF, PROCESS),
        Line("G1", "retrieval beside generation: seconds of an answer", "S, M, RETRO", "retrieval between chunks",
             PROCESS),
        Line("G1S", "retrieval beside generation: seconds of an answer", "RETRO 582M (the thesis' times)",
             "retrieval between chunks, the thesis", "simulated"),
        Line("G3", "retrievals of running sequences in batches: steps a token", "a small random one",
             "the thesis, a simulation", "simulated, and in process"),
        Line("G1P", "a model that reads retrieved chunks: perplexity, facts told", "RETRO-type, 3.8M",
             "itself without retrieval, the thesis", PROCESS),
        Line("G1Q", "passages in a prompt: before or after the question, shifted, replaced", "S, M",
             "other places and ways", PROCESS),
        Line("X1", "text and logits equal transformers'", "small random ones", "transformers, fp32", PROCESS),
        Line("X2", "answers and KL with weights of 8 and 4 bits", _SHIPPED, "its own fp32, llama.cpp", PROCESS),
    ),
    "guarantees": (
        Line("R1", "latency added by router, bus and worker hop", _SIM, _ITSELF, HTTP),
        Line("R2", "admission never exceeds a lane's depth", "-", _ITSELF, "through the bus"),
        Line("R1C", "1,000 streams open at once", _SIM, _ITSELF, HTTP),
        Line("P3", "a slow, hung or dead page tier: first token", "S", "the same engine without a tier", PROCESS),
        Line("P4", "restored pages are exact", "random small models", "the undisturbed computation", PROCESS),
        Line("P5", "which pages a tier drops", "loads not seen", "LRU, S3-FIFO, who knows how often", "simulated"),
        Line("F1", "kill -9 under embeddings, search, ingest", f"{_ENCODER}", _ITSELF, HTTP),
        Line("F1C", "kill -9 under chat", _SHIPPED, _ITSELF, HTTP),
        Line("F1A", "kill -9 under everything at once", f"{_SHIPPED}, {_ENCODER}", _ITSELF, HTTP),
        Line("F1P", "kill -9 under conversations with every page tier", _SHIPPED, _ITSELF, HTTP),
        Line("F1R", "kill -9 under answers that retrieve while they are written", _SHIPPED, _ITSELF, HTTP),
        Line("F2", "cancelled or abandoned embeddings stop", _SIM, _ITSELF, HTTP),
        Line("F2C", "cancelled or abandoned streams stop", _SIM, _ITSELF, HTTP),
        Line("F3", "a hung worker of each kind: the others' latency", _SIM, _ITSELF, HTTP),
        Line("F4", "SIGTERM with requests in flight", _SIM, _ITSELF, HTTP),
        Line("F4C", "SIGTERM with streams in flight", _SIM, _ITSELF, HTTP),
        Line("F5", "memory under load", f"{_SHIPPED}, {_ENCODER}", _ITSELF, HTTP),
        Line("F5P", "bytes of every page tier", _SHIPPED, _ITSELF, HTTP),
        Line("F6", "fuzzed API, hostile inputs", f"{_SHIPPED}, {_ENCODER}", _ITSELF, HTTP),
    ),
}  # fmt: skip

README = (
    "H2",
    "H1",
    "P1",
    "E1",
    "V1",
    "L2",
)  # the rows that the README may quote, the product's own case first
CLAIM = ("measured", "model", "against", "how", "the part that came out worst", "machine")
_SOME = re.compile(r"\d+ of \d+ cells were measured.*")
_WHERE = "[docs/benchmarks.md](docs/benchmarks.md)"
NO_CLAIM = (
    f"How fast it is beside llama.cpp's server, vLLM, infinity and pgvector stands in {_WHERE}, losses included. Most\n"
    "rows there were measured on an earlier tree and say so; until they are measured on this one, no figure\n"
    "stands here. No accelerator was at hand for any of them."
)
ALL_CLAIMS = f"All rows, losses included, each with the command that repeats it: {_WHERE}. None had an accelerator."


def claim(row: str, figures: Sequence[Figure], found: Found) -> list[str]:
    """Return a row's line in the README."""
    (line,) = (each for some in SECTIONS.values() for each in some if each.row == row)
    what = f"[{line.what}](docs/benchmarks/{row}.md)"
    said = f"{worst(figures, found)} ({lowest(found)})"
    return [what, line.model, line.against, line.how, said, described(found["machine"])]


def cells(line: Line, figures: Sequence[Figure], found: Found | None, *, stale: bool) -> list[str]:
    """Return a row's line; `figures` are those of the row, `found` its document or None."""
    about = [f"[{line.row}](benchmarks/{line.row}.md)", *line[1:]]
    command = f"`spillway bench {line.row}`"
    if found is None:
        return [*about, "not measured", "-", "-", command]
    reached = lowest(found)
    more = ", **stale**" if stale else ""
    left = ", not complete" if found.get("left") else ""
    where = f"{found['measured_at'][:10]}, {described(found['machine'])}"
    return [*about, worst(figures, found), f"{reached}{left}{more}", where, command]


def worst(figures: Sequence[Figure], found: Found) -> str:
    """Return the first figure whose verdict is the row's lowest; where no figure has it, the verdict's name.

    A row of which only some cells were measured says so.
    """
    level = lowest(found)
    some = "".join(f"; {note.rstrip('.')}" for note in found["notes"] if _SOME.fullmatch(note))
    for figure in figures:
        if not figure.met or found["met"].get(figure.met, "-") == level:
            return f"{figure.what}: {figure.told(found)[0]}{some}"
    named: str = next(what for what, word in found["met"].items() if word == level)
    return f"{named}{some}"
