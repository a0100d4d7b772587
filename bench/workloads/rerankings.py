"""Reranking of the hits of follow-up questions: what a cross-encoder brings to the top, and what that takes.

The product's own order is that of `retrieval.rerank`, asked for over the mesh. Beside it stands what a fusion of the
search's order with the cross-encoder's (reciprocal ranks) would find, and what other queries for the cross-encoder,
computed from /v1/rerank's scores of the same passages: no retrieval does that.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from spillway_client import AsyncSpillway, ChatCompletion, Hit

from bench.document import Body
from bench.workloads import trained_ranker
from bench.workloads.follow_ups import DEPTHS, FollowUp, K, asked, found_by, spent
from common import ranking
from services.router.text import rewrites

CANDIDATES = DEPTHS[2:]
TITLE = "What reranking finds and costs"
UNKNOWN = "not measured"
_FIGURES = "training.json"


class Reranker(NamedTuple):
    """A cross-encoder of the mesh by its name, and its directory, None for one that nobody trained."""

    model: str
    directory: Path | None


class WaysToAsk(NamedTuple):
    """A follow-up as it is asked, the queries that are searched for, and the retrieval's options for that.

    The last query is the one that the hits are reranked by.
    """

    one: FollowUp
    queries: list[str]
    options: dict[str, Any]


def ways(given: Sequence[FollowUp]) -> dict[str, list[WaysToAsk]]:
    """Return by the query's writer how each follow-up is asked; by hand it stands alone, with nothing before it."""
    rule = {"rewrite": {"by": "rule"}}
    alone = [replace(one, ask=one.alone, before=[]) for one in given]
    return {
        "no rewriting": [WaysToAsk(one, one.plain, {}) for one in given],
        "`rewrite`, the rule": [WaysToAsk(o, rewrites.carried(o.messages), rule) for o in given],
        "written by hand": [WaysToAsk(one, [one.alone], {}) for one in alone],
    }


async def measure(
    client: AsyncSpillway, given: Sequence[FollowUp], reranker: Reranker, body: Body
) -> None:
    """Put into `body` what the search's order, `rerank` and a fusion of both find, and what `rerank` takes."""
    rows = []
    for name, some in ways(given).items():
        searched = [await found_by(client, each.queries) for each in some]
        rows.append([name, "the search", *_shares(_places(some, searched)), "-", "-"])
        for candidates in CANDIDATES:
            answers = [await _reranked(client, each, reranker.model, candidates) for each in some]
            at = _places(some, [_hits(answer) for answer in answers])
            shares = _shares(at) if reranker.directory is not None else [UNKNOWN] * 2
            rows.append([name, f"`rerank`, {candidates} candidates", *shares, *_cost(answers)])
            body.samples[f"rerank {candidates}: {name}"] = [
                {"place": place, "ms": spent(answer, "rerank"), "tokens": _tokens(answer)}
                for place, answer in zip(at, answers, strict=True)
            ]
        if reranker.directory is not None:
            tried = await _other_orders(client, some, searched, reranker.model)
            rows += [[name, order, *_shares(places), "-", "-"] for order, places in tried.items()]
            body.samples |= {f"{order}: {name}": places for order, places in tried.items()}
    columns = ["who writes the query", "order", "in the first 1", f"in the first {K}"]
    body.table(TITLE, [*columns, "ms (median)", "tokens scored"], rows)
    body.notes.append(_note(reranker))


async def _other_orders(
    client: AsyncSpillway, some: Sequence[WaysToAsk], searched: Sequence[list[Hit]], model: str
) -> dict[str, list[int | None]]:
    """Return where the page stands in orders that the product does not make, by the order's name."""
    own = [
        await _scores(client, each.queries[-1], hits, model)
        for each, hits in zip(some, searched, strict=True)
    ]
    found = {}
    for count in CANDIDATES:
        both = [fused(hits[:count], row[:count]) for hits, row in zip(searched, own, strict=True)]
        found[f"fused, {count} candidates"] = _places(some, both)
    if not some[0].one.before:
        return found
    count = CANDIDATES[0]
    for name, queries in (
        ("the two last questions", [f"{e.one.ask} {e.one.before[-1][0]}" for e in some]),
        ("the question written by hand", [each.one.alone for each in some]),
    ):
        ordered = []
        for query, hits in zip(queries, searched, strict=True):
            scores = await _scores(client, query, hits[:count], model)
            best = ranking.best_first(scores, len(scores))
            ordered.append([hits[place] for place, _ in best])
        found[f"reranked by {name}, {count} candidates"] = _places(some, ordered)
    return found


def fused(hits: Sequence[Hit], scores: Sequence[float]) -> list[Hit]:
    """Return hits by the reciprocal ranks of their own order and of their scores by a cross-encoder."""
    own = [-float(rank) for rank in range(len(hits))]
    return [hits[place] for place, _ in ranking.fused([own, list(scores)], len(hits))]


async def _scores(
    client: AsyncSpillway, query: str, hits: Sequence[Hit], model: str
) -> list[float]:
    answer = await client.rerank(
        query, [hit.text or "" for hit in hits], model=model, timeout_s=300
    )
    by_place = {result.index: result.relevance_score for result in answer.results}
    return [by_place[at] for at in range(len(hits))]


async def _reranked(
    client: AsyncSpillway, each: WaysToAsk, model: str, candidates: int
) -> ChatCompletion:
    options = {"rerank": {"model": model, "candidates": candidates}, "include_passages": True}
    return await asked(client, each.one, each.options | options)


def _hits(answer: ChatCompletion) -> list[Hit]:
    """Return the passages of a grounded answer as hits; all K of them were read, or the order is not the product's."""
    assert answer.retrieval is not None
    passages = answer.retrieval.passages
    assert len(passages) == K, f"{len(passages)} passages of {K} were read"
    return [Hit(p.document_id, p.score, text=p.text, chunk=p.chunk) for p in passages]


def _places(some: Sequence[WaysToAsk], hits: Iterable[Sequence[Hit]]) -> list[int | None]:
    return [each.one.place(found) for each, found in zip(some, hits, strict=True)]


def _shares(places: Sequence[int | None]) -> list[str]:
    found = [sum(at is not None and at < depth for at in places) for depth in (1, K)]
    return [f"{count / len(places):.1%}" for count in found]


def _cost(answers: Sequence[ChatCompletion]) -> list[str]:
    ms = statistics.median(spent(answer, "rerank") for answer in answers)
    return [f"{ms:.0f}", f"{statistics.median(map(_tokens, answers)):.0f}"]


def _tokens(answer: ChatCompletion) -> int:
    return int(answer.retrieval.rerank["tokens"]) if answer.retrieval is not None else 0


def _note(reranker: Reranker) -> str:
    size = "the default encoder's layers (6 of 384)"
    if reranker.directory is None:
        return (
            f"`{reranker.model}` has {size} under a random head: its time is that of a small cross-encoder, its order"
            f" means nothing, so what it finds is not measured. For a trained one, {trained_ranker.HINT}."
        )
    path = reranker.directory / _FIGURES
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    made = f" {_held_out(told)}" if told else ""
    return (
        f"`rerank` is the product's own path, with `{reranker.model}`. Written by hand here is the question that stands"
        " alone, searched for by itself. Fused: by reciprocal ranks in the search's order and in the cross-encoder's;"
        " the product does not do that. It reranks by the last query that is searched for, which by the rule holds the"
        f" last turn; what other queries would find is computed as well.{made}"
    )


def _held_out(told: Mapping[str, Any]) -> str:
    """Return what a training's figures say of the questions that it held out."""
    shares = "; ".join(
        f"{name} {figures['first 1']:.1%} in the first 1, MRR {figures['MRR']:.3f}"
        for name, figures in told["figures"].items()
    )
    return (
        f"`scripts/train_reranker.py` trained it in {told['minutes']:.0f} minutes on {told['lists']} lists of"
        f" docstrings and readmes of other packages; on {told['held-out questions']} questions of pages held out:"
        f" {shares}."
    )
