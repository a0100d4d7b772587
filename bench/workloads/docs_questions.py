"""Questions about real documents, asked of the shipped model, which cannot read them: extractive answers, judged.

`docs_questions.json` was written before the rule that answers them was made: 30 questions that the sample collection
`docs` answers, with phrases one of which an answer must hold, and 20 that it does not, to be refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from spillway_client import AsyncSpillway, ChatCompletion

from bench.document import Body
from cli import sample
from cli.files import Item

COLLECTION = "docs"
K = 5
QUESTIONS = Path(__file__).with_name("docs_questions.json")
_BATCH = 32


class DocsQuestion(NamedTuple):
    """A question, and the phrases one of which its answer holds; none: it is to be refused."""

    text: str
    phrases: tuple[str, ...]


def questions() -> list[DocsQuestion]:
    """Return the 50 questions."""
    rows = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    return [
        DocsQuestion(row["question"], tuple(row.get("answer", ())))
        for row in (*rows["answerable"], *rows["unanswerable"])
    ]


async def load(client: AsyncSpillway) -> int:
    """Store the sample collection `docs`; return how many documents it has."""
    await client.collections.create(COLLECTION)
    items = [item for item in sample.documents() if isinstance(item, Item)]
    for first in range(0, len(items), _BATCH):
        some = items[first : first + _BATCH]
        rows = [{"id": i.id, "text": i.text, "metadata": i.metadata} for i in some]
        await client.documents(COLLECTION).add(rows, timeout_s=300)
    return len(items)


def right(question: DocsQuestion, said: str, answer: ChatCompletion) -> bool:
    """Return whether an answer holds a phrase that answers its question and cites it, or refuses as it should."""
    if not question.phrases:
        return not answer.citations
    plain = " ".join(said.lower().split())
    return bool(answer.citations) and any(phrase.lower() in plain for phrase in question.phrases)


async def measure(client: AsyncSpillway, body: Body) -> None:
    """Ask all questions and put exact counts, and every answer, into `body`."""
    rows = []
    for question in questions():
        answer = await client.chat.completions.create(
            question.text, retrieval={"collection": COLLECTION, "k": K}, timeout_s=300
        )
        kind = "answerable" if question.phrases else "unanswerable"
        rows.append(
            {
                "kind": kind,
                "question": question.text,
                "said": answer.text,
                "right": right(question, answer.text, answer),
                "refused": not answer.citations,
            }
        )
    table = [
        [kind, *_counts(row for row in rows if row["kind"] == kind)]
        for kind in ("answerable", "unanswerable")
    ]
    table.append(["all", *_counts(rows)])
    columns = ["questions about `docs`, answered by quotes", "asked", "right", "wrong", "refused"]
    body.table("", columns, table)
    body.samples["docs"] = rows
    body.notes.append(
        f"`docs` is the sample collection, which the shipped model cannot read, asked with k {K}. Right: a quoted"
        " sentence holds the phrase that answers the question, or a question without an answer is refused. The"
        " questions were written before the rule; see `bench/workloads/docs_questions.json`."
    )


def _counts(rows: Iterable[dict[str, object]]) -> list[str]:
    some = list(rows)
    good, refused = (sum(bool(row[name]) for row in some) for name in ("right", "refused"))
    return [str(len(some)), str(good), str(len(some) - good), str(refused)]
