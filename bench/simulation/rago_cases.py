"""RAGO's four cases on its hardware (chapter 3 of the thesis: tables 3.2 and 3.3), as schemas and an inventory."""

from __future__ import annotations

from planner.inventory import Inventory
from planner.rag_schema import InferenceStage, RAGSchema, RagStage, RetrievalStage
from planner.schedule_search import SearchSpace
from planner.stage_profile import profile_of

PROMPT, ANSWER, QUESTION = 512, 256, 32
ENCODER, REWRITER, RERANKER = 120e6, 8e9, 120e6
RERANKED = 16 * 100  # tokens of the candidates
LONGEST_BATCH = 1024


def inventory(chips: int = 128, hosts: int = 32) -> Inventory:
    """Return XPU-C's with four to a host."""
    return Inventory(chips=chips, hosts=hosts, chip="XPU-C", chips_per_host=4)


def hyperscale(params: float, queries: int = 1, rounds: int = 1) -> RAGSchema:
    """Return case I, or with more rounds case III: 64e9 vectors of 96 bytes, a thousandth of them scanned."""
    return _schema("hyperscale", params, {"retrieval": _hyperscale_search(queries, rounds)})


def long_context(params: float, tokens: int = 1_000_000) -> RAGSchema:
    """Return case II: documents encoded in the request, 128 tokens a vector, searched exactly.

    The encoder's efficiency is fitted to one number of table 3.4, the baseline's 0.65 requests/s a chip.
    """
    stages: dict[str, RagStage] = {
        "db_encode": InferenceStage(params=ENCODER, tokens=tokens, efficiency=0.85),
        "retrieval": RetrievalStage(vectors=tokens / 100, vector_bytes=2 * 768),
    }
    return _schema("long context", params, stages)


def rewritten(params: float) -> RAGSchema:
    """Return case IV: a question rewritten by a model of 8e9, and candidates reranked by one of 120e6."""
    stages: dict[str, RagStage] = {
        "rewrite_prefix": InferenceStage(params=REWRITER, tokens=QUESTION),
        "rewrite_decode": InferenceStage(params=REWRITER, tokens=QUESTION, context=QUESTION),
        "retrieval": _hyperscale_search(1, 1),
        "rerank": InferenceStage(params=RERANKER, tokens=RERANKED),
    }
    return _schema("rewriter and reranker", params, stages)


def space(schema: RAGSchema, chips: int = 128, hosts: int = 32) -> SearchSpace:
    """Return all schedules of a case."""
    there = inventory(chips, hosts)
    return SearchSpace(schema, there, profile_of(schema, there))


def baseline(schema: RAGSchema, chips: int = 128, hosts: int = 32) -> SearchSpace:
    """Return the schedules of a system for models alone: all stages share the prefix' chips, decode has as many."""
    there = inventory(chips, hosts)
    return SearchSpace(
        schema, there, profile_of(schema, there), placements=frozenset({schema.placed}), decode_ratio=1,
    )  # fmt: skip


def _hyperscale_search(queries: int, rounds: int) -> RetrievalStage:
    return RetrievalStage(vectors=64e9, vector_bytes=96, scan=0.001, queries=queries, rounds=rounds)


def _schema(name: str, params: float, stages: dict[str, RagStage]) -> RAGSchema:
    answers: dict[str, RagStage] = {
        "prefix": InferenceStage(params=params, tokens=PROMPT),
        "decode": InferenceStage(params=params, tokens=ANSWER, context=PROMPT),
    }
    return RAGSchema({**stages, **answers}, f"{name}, {params / 1e9:g}B")
