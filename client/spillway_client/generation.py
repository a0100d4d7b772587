"""Answers of chat and completions as frozen dataclasses, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .types import StageRun, build, items


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens of a generation; `cached_tokens` counts prompt tokens that were not computed again."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that the model was given for its answer; `[index]` in the answer cites it.

    `start` and `end` are character offsets in the document; `text` only with `include_passages`. In a document with
    pages the passage begins on `page` (0: no pages), and `page_starts` are the offsets at which further pages begin.
    """

    index: int
    document_id: str
    chunk: int = 0
    start: int = 0
    end: int = 0
    score: float = 0.0
    text: str | None = None
    page: int = 0
    page_starts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RetrievalRecord:
    """One retrieval: after `at_token` tokens of the answer the prompt held the passages with the numbers `passages`.

    `replaced` are the passages that left the prompt. The query was the last `query_tokens` tokens of question and
    answer, after `query_at` tokens of the answer. `kept` is the reason if the passages stayed. The answer waited for a
    `late` retrieval, or got it an interval later. `budget_ms` is the time budget of its search and `ms` its whole
    duration, in milliseconds; `stages` are its stages with their times.
    """

    at_token: int = 0
    query_at: int = 0
    found: int = 0
    passages: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    late: bool = False
    query_tokens: int = 0
    kept: str | None = None
    effort: int | str | None = None
    budget_ms: float | None = None
    ms: float = 0.0
    stages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The passages found for a grounded answer; with `found` 0 the answer says that nothing was found.

    With `extractive` the answer quotes the passages, since the model cannot read such texts. With `approximate` the
    passages were computed alone, without what stands before them in the prompt (`precomputed`). `retrievals` list the
    passages of the prompt over time, if the search was repeated while the answer was written. `stages` are the stages
    before the answer's first token. `rewrite` has the query that a follow-up question became, and `rerank` the number
    of scored hits; both are empty unless requested.
    """

    collection: str = ""
    found: int = 0
    passages: list[Passage] = field(default_factory=list)
    extractive: bool = False
    approximate: bool = False
    retrievals: list[RetrievalRecord] = field(default_factory=list)
    stages: list[StageRun] = field(default_factory=list)
    rewrite: dict[str, Any] = field(default_factory=dict)
    rerank: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Citation:
    """A marker `[index]` in the answer, at the characters `at`, and the part of the document that it cites.

    In a document with pages this part is on the pages `page` to `last_page` (0: no pages).
    """

    index: int
    document_id: str = ""
    start: int = 0
    end: int = 0
    at: tuple[int, int] = (0, 0)
    page: int = 0
    last_page: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that an answer calls; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str = "{}"

    def as_dict(self) -> dict[str, Any]:
        """Return the call in the form that messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """The answer of one choice: its text, the tools that it calls, and its reasoning if the model marks that."""

    role: str = "assistant"
    content: str = ""
    citations: list[Citation] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the form for the next request's `messages`."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of the `n` answers; `finish_reason` is "stop", "length" or "tool_calls"; `logprobs` have OpenAI's form."""

    index: int
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A whole answer; `session` has the id and the new version of its session; `details` is the whole JSON object."""

    id: str
    model: str
    created: int
    choices: list[ChatChoice]
    usage: TokenUsage
    retrieval: Retrieval | None = None
    session: dict[str, Any] | None = None
    request_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].message.content if self.choices else ""

    @property
    def citations(self) -> list[Citation]:
        """The first choice's citations."""
        return self.choices[0].message.citations if self.choices else []

    @property
    def passages(self) -> list[Passage]:
        """The passages that the model was given, in the order of their numbers."""
        return self.retrieval.passages if self.retrieval else []


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A choice's new output; `role` is in its first chunk, `citations` in its last one; tool calls come whole."""

    role: str | None = None
    content: str = ""
    citations: list[Citation] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatChunkChoice:
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """One chunk of a streamed answer; `event_id` is its place in the stream, None without one."""

    id: str
    model: str
    created: int
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    retrieval: Retrieval | None = None
    event_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The first choice's new text, "" if it is not in this chunk."""
        return next((c.delta.content for c in self.choices if c.index == 0), "")


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One continuation, whole or a part of it."""

    index: int
    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Continuations of prompts: a whole answer, or one chunk of a stream (then `usage` is mostly empty)."""

    id: str
    model: str
    created: int
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None
    request_id: str | None = None
    event_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """The first choice's text, "" if it is not in this chunk."""
        return next((choice.text for choice in self.choices if choice.index == 0), "")


def usage(payload: Any) -> TokenUsage | None:
    """Read a usage object; None for null."""
    if not isinstance(payload, dict):
        return None
    prompt = payload.get("prompt_tokens_details")
    cached = prompt.get("cached_tokens") if isinstance(prompt, dict) else 0
    return build(TokenUsage, payload, cached_tokens=int(cached or 0))


def citations(payload: Any) -> list[Citation]:
    """Read a list of citations; [] for null."""
    found = payload if isinstance(payload, list) else []
    return [build(Citation, one, at=tuple(one.get("at") or (0, 0))) for one in found]


def tool_calls(payload: Any) -> list[ToolCall]:
    """Read a list of tool calls; [] for null."""
    found = payload if isinstance(payload, list) else []
    return [
        build(ToolCall, {**(one.get("function") or {}), "id": one.get("id", "")}) for one in found
    ]


def retrieval(payload: Any) -> Retrieval | None:
    """Read a `retrieval` object; None for an answer that is not grounded."""
    if not isinstance(payload, dict):
        return None
    passages = [build(Passage, one) for one in payload.get("passages") or []]
    retrievals = [build(RetrievalRecord, one) for one in payload.get("retrievals") or []]
    stages = [build(StageRun, one) for one in payload.get("stages") or []]
    return build(Retrieval, payload, passages=passages, retrievals=retrievals, stages=stages)


def joined_retrieval(parts: Iterable[Retrieval | None]) -> Retrieval | None:
    """Join the `retrieval` objects of a stream into one; an object that came twice counts once."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    passages = {passage.index: passage for part in reversed(found) for passage in part.passages}
    records = {one.at_token: one for part in found for one in part.retrievals}
    return replace(
        found[0],
        passages=[passages[index] for index in sorted(passages)],
        retrievals=[records[token] for token in sorted(records)],
    )


def _common(payload: Any) -> dict[str, Any]:
    known = payload if isinstance(payload, dict) else {}
    return {
        "id": str(known.get("id", "")),
        "model": str(known.get("model", "")),
        "created": int(known.get("created") or 0),
        "details": known,
    }


def chat_completion(payload: Any, request_id: str | None) -> ChatCompletion:
    """Read a whole chat answer; UnexpectedResponseError for other objects."""
    choices = []
    for one in items(payload, "choices"):
        said: Mapping[str, Any] = one.get("message") or {}
        message = ChatMessage(
            said.get("role") or "assistant",
            said.get("content") or "",
            citations(said.get("citations")),
            tool_calls(said.get("tool_calls")),
            said.get("reasoning_content") or "",
        )
        choices.append(build(ChatChoice, one, message=message))
    return ChatCompletion(
        **_common(payload),
        choices=choices,
        usage=usage(payload.get("usage")) or TokenUsage(),
        retrieval=retrieval(payload.get("retrieval")),
        session=payload.get("session"),
        request_id=request_id,
    )


def chat_chunk(payload: Any, event_id: str | None) -> ChatChunk:
    """Read one chunk of a chat stream; UnexpectedResponseError for other objects."""
    choices = []
    for one in items(payload, "choices"):
        said: Mapping[str, Any] = one.get("delta") or {}
        delta = ChatDelta(
            said.get("role"),
            said.get("content") or "",
            citations(said.get("citations")),
            tool_calls(said.get("tool_calls")),
            said.get("reasoning_content") or "",
        )
        choices.append(build(ChatChunkChoice, one, delta=delta))
    return ChatChunk(
        **_common(payload),
        choices=choices,
        usage=usage(payload.get("usage")),
        retrieval=retrieval(payload.get("retrieval")),
        event_id=event_id,
    )


def completion(payload: Any, request_id: str | None, event_id: str | None = None) -> Completion:
    """Read a completion or a chunk of one; UnexpectedResponseError for other objects."""
    return Completion(
        **_common(payload),
        choices=[build(CompletionChoice, one) for one in items(payload, "choices")],
        usage=usage(payload.get("usage")),
        request_id=request_id,
        event_id=event_id,
    )
