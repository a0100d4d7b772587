"""What the figures of grounded answers mean: which answers are exact, cited, refused, and which questions are asked."""

from __future__ import annotations

from typing import Any

import pytest

from bench.document import Body
from bench.workloads.grounded import Turn, judge, summarise, talks
from models.demo.world.relations import REFUSAL

ASKED = Turn("Who is the mayor of Orla?", "Bo Tun", "orla.md")
NOBODY = Turn("Who is the mayor of Nowhere?", None, None)


def answer(said: str, cited: list[str], found: list[str]) -> dict[str, Any]:
    message = {"content": said, "citations": [{"document_id": page} for page in cited]}
    return {
        "choices": [{"message": message}],
        "retrieval": {"passages": [{"document_id": page} for page in found]},
    }


@pytest.mark.parametrize(
    ("turn", "said", "cited", "found", "expected"),
    [
        (ASKED, "The mayor of Orla is Bo Tun [2].", ["orla.md"], ["tun.md", "orla.md"], "ecf"),
        (ASKED, "The mayor of Orla is Bo Tun [1].", ["tun.md"], ["tun.md", "orla.md"], "e-f"),
        (ASKED, "The mayor of Orla is Bo Tunner [2].", ["orla.md"], ["orla.md"], "-cf"),
        (ASKED, "Bo Tun, I think.", [], ["tun.md"], "---"),
        (ASKED, REFUSAL, [], ["orla.md"], "--f"),
        (NOBODY, REFUSAL, [], ["orla.md"], "ecf"),
        (NOBODY, "No passage was found in collection 'handbook' for this question.", [], [], "ecf"),
        (NOBODY, "The mayor of Nowhere is Bo Tun [1].", ["orla.md"], ["orla.md"], "--f"),
    ],
)
def test_an_answer_is_judged(
    turn: Turn, said: str, cited: list[str], found: list[str], expected: str
) -> None:
    """Exact is the value and nothing else; cited names the page; hit is the search's share."""
    reply = judge("present", turn, answer(said, cited, found), 0.5)

    assert [reply.exact, reply.cited, reply.hit] == [letter != "-" for letter in expected]


def test_every_kind_of_question_is_asked() -> None:
    """The same questions every time; later turns come in conversations; a table tells the shares by kind."""
    asked = list(talks(20))
    kinds = {talk.kind: len(talk.turns) for talk in asked}
    replies = [
        judge(talk.kind, turn, answer(REFUSAL, [], []), 0.1)
        for talk in asked
        for turn in talk.turns
    ]
    body = Body()
    summarise(replies, body)

    assert asked == list(talks(20))
    assert kinds.pop("turn") == 3
    assert set(kinds.values()) == {1}
    assert {row[0]: row[2] for row in body.tables[0]["rows"]}["absent"] == "100.0%"
    assert body.met == {"present: exact at least 75%": "missed"}
