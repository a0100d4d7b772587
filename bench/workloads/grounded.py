"""Grounded answers of the shipped model, judged end to end over HTTP.

`python -m bench.workloads.grounded --url URL --json FILE`

Asks a running instance held-out questions about its `handbook`: those that a page answers, those that none does,
hand-written ones, and conversations whose later turns lean on the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench import ROOT
from bench.document import BenchOptions, Body, build, origin, save
from models.demo.world import handbook
from models.demo.world.questions import FOLLOW, NOUNS
from models.demo.world.relations import OF_KIND, refuses
from models.demo.world.tasks import ANSWER

COLLECTION = "handbook"
K = 5
AT_ONCE = 4
TIMEOUT_S = 300.0
FREE = ROOT / "models" / "demo" / "free_questions.json"
GOALS = {"present": ("exact", 0.75)}
_SEED = "handbook conversations"


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with the value it expects (None: a refusal) and the page that says it."""

    question: str
    value: str | None
    page: str | None


@dataclass(frozen=True, slots=True)
class Talk:
    """Questions asked one after the other, in a session where there are several."""

    kind: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class GroundedReply:
    """One answer: `hit` is whether the page was among the passages, `cited` whether a marker names it."""

    kind: str
    question: str
    expected: str | None
    said: str
    exact: bool
    cited: bool
    hit: bool
    seconds: float


def talks(count: int) -> Iterator[Talk]:
    """Yield all conversations: `count` questions that a page answers, a fifth of that of the other kinds."""
    for q in handbook.questions(count):
        yield Talk("present", (Turn(q.text, q.value, q.page),))
    for text in handbook.absent_questions(max(1, count // 5)):
        yield Talk("absent", (Turn(text, None, None),))
    if FREE.exists():
        by_name = {page.name: page.who for page in handbook.pages()}
        for row in json.loads(FREE.read_text(encoding="utf-8"))[:count]:
            value = by_name[row["page"]].facts[row["relation"]]
            yield Talk("free", (Turn(row["question"], value, row["page"]),))
    yield from conversations(max(1, count // 5))


def conversations(count: int) -> Iterator[Talk]:
    """Yield conversations of three turns about one page each: the later ones name nothing ("And its mayor?")."""
    rng = random.Random(_SEED)
    pages = {page.name: page.who for page in handbook.pages()}
    for first in handbook.questions(count, _SEED):
        who = pages[first.page]
        others = [key for key in OF_KIND[who.kind] if key != first.relation]
        turns = [Turn(first.text, first.value, first.page)]
        for key in rng.sample(others, min(2, len(others))):
            frame = rng.choice(FOLLOW).replace("{p}", who.possessive.lower())
            text = frame.replace("{n}", rng.choice(NOUNS[key]))
            turns.append(Turn(text, who.facts[key], first.page))
        yield Talk("turn", tuple(turns))


def judge(kind: str, turn: Turn, body: dict[str, Any], seconds: float) -> GroundedReply:
    """Compare an answer with what was expected: the right value and nothing else, or a refusal and nothing else."""
    message, found = body["choices"][0]["message"], body["retrieval"]["passages"]
    said = message["content"].strip()
    parts = ANSWER.fullmatch(said)
    refused = refuses(said) or (not found and said.startswith("No passage was found"))
    exact = refused if turn.value is None else bool(parts) and parts[3] == turn.value  # type: ignore[index]
    cited = refused if turn.page is None else turn.page in _cited(message)
    hit = turn.page is None or turn.page in {row["document_id"] for row in found}
    return GroundedReply(kind, turn.question, turn.value, said, exact, cited, hit, seconds)


def _cited(message: dict[str, Any]) -> set[str]:
    return {citation["document_id"] for citation in message["citations"]}


class Asker:
    """Asks conversations of one server, a few at once; a busy one is asked again when it says."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(self, given: Sequence[Talk], at_once: int = AT_ONCE) -> list[GroundedReply]:
        """Return the answers to all turns, in the order of `given`."""
        room = asyncio.Semaphore(at_once)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(
            self._url, headers=self._headers, timeout=timeout
        ) as session:

            async def one(talk: Talk) -> list[GroundedReply]:
                async with room:
                    return await self._talk(session, talk)

            return [reply for each in await asyncio.gather(*map(one, given)) for reply in each]

    async def _talk(self, session: aiohttp.ClientSession, talk: Talk) -> list[GroundedReply]:
        more: dict[str, Any] = {}
        if len(talk.turns) > 1:
            more["session"] = (await self._post(session, "/v1/sessions", {}))["id"]
        replies = []
        for number, turn in enumerate(talk.turns, 1):
            body = {
                "messages": [{"role": "user", "content": turn.question}],
                "retrieval": {"collection": COLLECTION, "k": K},
                "temperature": 0,
                "max_tokens": 64,
                **more,
            }
            began = time.monotonic()
            answer = await self._post(session, "/v1/chat/completions", body)
            kind = talk.kind if len(talk.turns) == 1 else f"{talk.kind} {number}"
            replies.append(judge(kind, turn, answer, time.monotonic() - began))
        return replies

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        while True:
            async with session.post(path, json=body) as response:
                if response.status in {429, 503}:
                    await asyncio.sleep(float(response.headers.get("Retry-After", "1")))
                    continue
                answer: dict[str, Any] = await response.json()
                if response.status >= 300:
                    raise RuntimeError(f"{path}: {response.status} {answer}")
                return answer


def summarise(replies: Sequence[GroundedReply], body: Body) -> None:
    """Put shares by kind into a document's table, every answer into its samples."""
    kinds = list(dict.fromkeys(reply.kind for reply in replies))
    rows = []
    for kind in kinds:
        some = [reply for reply in replies if reply.kind == kind]
        shares = {
            "exact": sum(r.exact for r in some) / len(some),
            "cited": sum(r.cited for r in some) / len(some),
            "hit": sum(r.hit for r in some) / len(some),
        }
        seconds = sorted(r.seconds for r in some)[len(some) // 2]
        rows.append(
            [kind, str(len(some)), *(f"{share:.1%}" for share in shares.values()), f"{seconds:.2f}"]
        )
        if kind in GOALS:
            name, goal = GOALS[kind]
            met = shares[name] >= goal
            body.met[f"{kind}: {name} at least {goal:.0%}"] = "goal" if met else "missed"
    columns = ["questions about the handbook", "asked", "exact", "the page cited"]
    body.table("", [*columns, "the page retrieved", "median s"], rows)
    body.samples["replies"] = [asdict(reply) for reply in replies]
    body.notes.append(
        f"`retrieval: {{collection: {COLLECTION}, k: {K}}}`, greedy. Exact: the right value and nothing else; for "
        "`absent` the refusal, word for word. `free` was written by hand; the later turns of a session name nothing."
    )


async def measure(url: str, count: int, body: Body, key: str = "") -> None:
    """Ask a running instance everything and put the figures into `body`."""
    summarise(await Asker(url, key).ask(list(talks(count))), body)


def main() -> int:
    """Ask a running instance; 1 if a goal is missed."""
    parser = argparse.ArgumentParser("python -m bench.workloads.grounded", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--count", type=int, default=1000, help="questions that a page answers")
    parser.add_argument("--json", type=Path, help="write figures and every answer here")
    args = parser.parse_args()
    body = Body()
    asyncio.run(measure(args.url, args.count, body, args.api_key))
    found = build("Q1", TITLE, body, BenchOptions(count=args.count), origin())
    if args.json:
        save(args.json, found)
    from bench.cli import show  # noqa: PLC0415 - as `spillway bench` shows it

    show(found)
    return int("missed" in body.met.values())


TITLE = "Grounded answers of the shipped model over HTTP"

if __name__ == "__main__":
    sys.exit(main())
