"""Rewriting of follow-up questions, by a model or a rule, into questions that a search understands on their own.

The module writes the model's prompt and reads the question from its output, which is never shown as an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from common.types.generation import SamplingParams
from common.wire.workflows import AnswerMarks, ChatRequest, GenerationOptions, RewriteOptions
from services.router.text.chats import generation
from services.router.text.generations import GenerationSpec
from services.router.text.tokens import Spec

INSTRUCTION = """\
Rewrite the last question so that it can be understood without the conversation. Put what its words refer to in their \
place, and change nothing else. Write the rewritten question and nothing else.

{conversation}

Last question: {question}

Rewritten question:"""

_TURNS = 4
_MESSAGE_CHARS, _ANSWER_CHARS = 400, 200
_QUERY_CHARS = 512
_NAMES = {"user": "User", "assistant": "Assistant"}
_LABEL = re.compile(
    r"\A\W*(?:(?:the\s+)?(?:rewritten|last|stand-?alone)\s+)?question\W*:\s*", re.IGNORECASE
)
_AROUND = " \t\"'`*“”«»"


def rewriting(
    ask: ChatRequest, spec: Spec, options: RewriteOptions, conversation: Sequence[dict[str, Any]]
) -> GenerationSpec | None:
    """Return the generate job in which the model of `spec` rewrites the last message of a conversation.

    The prompt holds the first 400 characters of each of the last four questions and answers, or of fewer messages if
    these exceed the model's context. None if no message fits, or if none precedes the last question.
    """
    before, question = _said(conversation)
    greedy = GenerationOptions(
        sampling=SamplingParams(temperature=0.0),
        max_new=options.max_tokens,
        stop_ids=sorted(spec.stop_ids),
        low=ask.options.low,
    )
    plain = ChatRequest(spec.name, ask.scope, [], greedy, marks=AnswerMarks())
    for first in range(max(0, len(before) - 2 * _TURNS), len(before)):
        said = "\n".join(
            f"{_NAMES[message['role']]}: {_head(message['content'])}" for message in before[first:]
        )
        content = INSTRUCTION.format(conversation=said, question=question)
        try:
            return generation(plain, spec, messages=[{"role": "user", "content": content}])
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
    return None


def _said(conversation: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages of users and the model before the last message, and the last message's text."""
    *before, last = conversation
    said = [m for m in before if m["role"] in _NAMES and (m["content"] or "").strip()]
    return said, last["content"].strip()


def _head(text: str) -> str:
    return " ".join(text[:_MESSAGE_CHARS].split())


def carried(conversation: Sequence[dict[str, Any]]) -> list[str]:
    """Return the queries that a rule makes of a conversation's last question: it alone, and it with each earlier turn.

    A turn is its question with the first 200 characters of its answer; the last four count, the newest last.
    """
    before, question = _said(conversation)
    turns: list[str] = []
    for message in before:
        text = message["content"].strip()
        if message["role"] == "user":
            turns.append(text)
        elif turns:
            turns[-1] += f" {text[:_ANSWER_CHARS]}"
    return [question, *(f"{question} {turn}" for turn in turns[-_TURNS:])]


def read(said: str) -> str | None:
    """Return the question that a model wrote, without label, quotes and reasoning; None if it wrote none."""
    _, _, after = said.rpartition("</think>")
    if "<think>" in after:
        return None
    for line in after.splitlines():
        question = _LABEL.sub("", line).strip(_AROUND)
        if any(map(str.isalnum, question)):
            return question[:_QUERY_CHARS]
    return None
