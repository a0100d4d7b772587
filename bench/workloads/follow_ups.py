"""Follow-up questions about real documents: who writes the query that finds their page, and what that takes.

`follow_ups.json` holds conversations about the sample collection `docs` whose last question needs what was said before,
the question as it would be asked alone, and the pages, and words of a page, that answer it. They were written before
any rule was tried on them, and of kinds that the rule without a rewriting seldom knows by their words.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spillway_client import AsyncSpillway, ChatCompletion, Hit

from bench.document import Body
from bench.workloads.docs_questions import COLLECTION
from services.router.text import passages, rewrites

FILE = Path(__file__).with_name("follow_ups.json")
DEPTHS = (1, 5, 16, 32)
K = 5
GOAL = 0.60  # the rule that is there without a rewriting finds at most so much in the first K
READER = "sim-chat"  # answers in no time, and is given passages to read
SHIPPED = "spillway-demo"


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A conversation's questions and answers, its last question, and where the answer stands."""

    before: list[list[str]]
    ask: str
    alone: str
    pages: list[str]
    holds: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as a chat's messages, the last question last."""
        said = [
            {"role": role, "content": text}
            for pair in self.before
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        return [*said, {"role": "user", "content": self.ask}]

    @property
    def plain(self) -> list[str]:
        """The queries that are searched for without a rewriting."""
        before = [question for question, _ in self.before]
        return passages.queries([*before, self.ask], self.before[-1][1])

    def place(self, hits: Sequence[Hit]) -> int | None:
        """Return how many hits stand before the first one that answers, None where none does."""
        for place, hit in enumerate(hits):
            plain = " ".join((hit.text or "").split())
            if hit.id in self.pages and (not self.holds or any(t in plain for t in self.holds)):
                return place
        return None


@dataclass(slots=True)
class WrittenQueries:
    """The queries that one writer made of a follow-up, in how many milliseconds, and of how many tokens."""

    queries: list[str]
    ms: float = 0.0
    read: int = 0
    wrote: int = 0


def follow_ups() -> list[FollowUp]:
    """Return the conversations."""
    return [FollowUp(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


async def rewritten(client: AsyncSpillway, one: FollowUp, model: str) -> WrittenQueries:
    """Return what `retrieval.rewrite` makes of a follow-up by a model, as the response tells it."""
    answer = await asked(client, one, {"rewrite": {"model": model}})
    assert answer.retrieval is not None
    told = answer.retrieval.rewrite
    queries = [one.ask, told["query"]]
    ms = spent(answer, "rewrite")
    return WrittenQueries(
        queries, ms, told.get("prompt_tokens", 0), told.get("completion_tokens", 0)
    )


async def shipped(client: AsyncSpillway, one: FollowUp) -> WrittenQueries:
    """Return what the shipped model, which a rewriting spares, makes of the same instruction."""
    said = "\n".join(f"User: {question}\nAssistant: {answer}" for question, answer in one.before)
    content = rewrites.INSTRUCTION.format(conversation=said, question=one.ask)
    answer = await client.chat.completions.create(
        content, model=SHIPPED, temperature=0, max_tokens=64, timeout_s=300
    )
    used, written = answer.usage, rewrites.read(answer.text)
    queries = [one.ask] if written is None else [one.ask, written]
    return WrittenQueries(queries, 0.0, used.prompt_tokens, used.completion_tokens)


async def found_by(client: AsyncSpillway, queries: Sequence[str]) -> list[Hit]:
    """Return the hits of all queries, as a grounded answer merges them."""
    rows = await client.search_many(COLLECTION, list(queries), k=DEPTHS[-1], timeout_s=300)
    best: dict[tuple[str, int], Hit] = {}
    for hit in (hit for row in rows for hit in row.data):
        known = best.get((hit.id, hit.chunk))
        if known is None or hit.score > known.score:
            best[hit.id, hit.chunk] = hit
    ordered = sorted(best.values(), key=lambda hit: (-hit.score, hit.id, hit.chunk))
    return ordered[: DEPTHS[-1]]


async def measure(
    client: AsyncSpillway, given: Sequence[FollowUp], instruct: str, body: Body
) -> None:
    """Put into `body` what each writer of queries finds, and what it takes; `instruct`: a model, or ""."""
    writers = {
        "the last question": [WrittenQueries([one.ask]) for one in given],
        **_rules(given),
        "the shipped model, asked all the same": [await shipped(client, one) for one in given],
        "written by hand": [WrittenQueries([one.ask, one.alone]) for one in given],
    }
    if instruct:
        by_model = [await rewritten(client, one, instruct) for one in given]
        writers[f"`rewrite`, {instruct}"] = by_model
    shares = await _found(client, given, writers, f"{len(given)} follow-ups", body)
    changed = switches(given)
    await _found(client, changed, _rules(changed), "The subject changes", body)
    hard = shares["no rewriting"] <= GOAL
    body.met[f"without a rewriting at most {GOAL:.0%} in the first {K}"] = (
        "goal" if hard else "missed"
    )
    body.notes.append(
        f"Collection `docs`, chunks of 200 tokens, the default encoder; a page is found where one of the hits answers."
        f" Of the first {DEPTHS[2]} or {DEPTHS[3]} hits a cross-encoder could bring the page into the first {K}:"
        " these columns are the most that `rerank` can find with so many candidates. Where the subject changes, the"
        " question that stands alone is asked after another conversation."
    )


def switches(given: Sequence[FollowUp]) -> list[FollowUp]:
    """Return the questions as they stand alone, each after the conversation of another one."""
    return [
        replace(one, ask=one.alone, before=given[(at * 17 + 23) % len(given)].before)
        for at, one in enumerate(given)
    ]


def _rules(given: Sequence[FollowUp]) -> dict[str, list[WrittenQueries]]:
    return {
        "no rewriting": [WrittenQueries(one.plain) for one in given],
        "`rewrite`, the rule": [WrittenQueries(rewrites.carried(one.messages)) for one in given],
    }


async def _found(
    client: AsyncSpillway,
    given: Sequence[FollowUp],
    writers: Mapping[str, Sequence[WrittenQueries]],
    title: str,
    body: Body,
) -> dict[str, float]:
    """Put a table of what each writer finds into `body`; return the shares found in the first K."""
    rows, shares = [], dict[str, float]()
    for name, written in writers.items():
        pairs = list(zip(given, written, strict=True))
        at = [one.place(await found_by(client, each.queries)) for one, each in pairs]
        found = [sum(p is not None and p < depth for p in at) / len(at) for depth in DEPTHS]
        shares[name] = found[DEPTHS.index(K)]
        rows.append([name, *(f"{share:.1%}" for share in found), *_cost(written)])
        body.samples[f"{title}: {name}"] = [
            {"ask": one.ask, "queries": each.queries, "place": place}
            for (one, each), place in zip(pairs, at, strict=True)
        ]
    columns = ["who writes the query", *(f"in the first {depth}" for depth in DEPTHS)]
    body.table(title, [*columns, "ms", "tokens read", "tokens written"], rows)
    return shares


async def asked(client: AsyncSpillway, one: FollowUp, options: dict[str, Any]) -> ChatCompletion:
    """Ask a follow-up of the collection, with more options of `retrieval`, and a model that answers in no time."""
    retrieval = {"collection": COLLECTION, "k": K, **options}
    return await client.chat.completions.create(
        one.messages, model=READER, max_tokens=1, retrieval=retrieval, timeout_s=300
    )


def spent(answer: ChatCompletion, stage: str) -> float:
    """Return how many milliseconds a stage of an answer's retrieval took, 0 where it did not run."""
    stages = answer.retrieval.stages if answer.retrieval is not None else []
    return sum(each.end_ms - each.start_ms for each in stages if each.name == stage)


def _cost(written: Sequence[WrittenQueries]) -> list[str]:
    told = (
        statistics.median(each.ms for each in written),
        statistics.median(each.read for each in written),
        statistics.median(each.wrote for each in written),
    )
    return [f"{value:.0f}" if value else "-" for value in told]
