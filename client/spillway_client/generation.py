"""Answers of chat and completions as frozen dataclasses, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .types import StageRun, build, items


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a generation; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage the answer was given to read: `index` is what `[index]` in the answer refers to.

    `start` and `end` are character offsets in the document; `text` only with `include_passages`. Of a document with
    pages `page` is the one it begins on (0: none), and `page_starts` are the offsets at which further ones begin.
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
    """One retrieval: from `at_token` tokens of the answer on the prompt held the passages of these numbers.

    Those in `replaced` were there before. Its query was of the last `query_tokens` tokens of question and answer as of
    `query_at` tokens of the answer. `kept` says why the passages stayed; a `late` one was waited for, or came an
    interval later. `budget_ms` is the time that its search had, `ms` what it took in all, `stages` when each began.
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
    """What was found for a grounded answer; `found` 0 means the answer says so plainly.

    With `extractive` the answer quotes the passages, since the model cannot read such texts. `retrievals` tell when
    which passages were in the prompt, where they were found anew while the answer was written. `stages` are those that
    came before the answer's first token. `rewrite` tells the query that a follow-up became, and `rerank` how many hits
    were scored; both are empty where they were not asked for.
    """

    collection: str = ""
    found: int = 0
    passages: list[Passage] = field(default_factory=list)
    extractive: bool = False
    retrievals: list[RetrievalRecord] = field(default_factory=list)
    stages: list[StageRun] = field(default_factory=list)
    rewrite: dict[str, Any] = field(default_factory=dict)
    rerank: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Citation:
    """A marker `[index]` in the answer, at characters `at`, and the part of the document it stands for.

    Of a document with pages it stands on the pages `page` to `last_page` (0: the document has none).
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
    """A function that an answer calls: `arguments` is a JSON object, written out."""

    id: str
    name: str
    arguments: str = "{}"

    def as_dict(self) -> dict[str, Any]:
        """Return the call as messages hold it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """The answer of one choice: its text, the tools that it calls, and its reasoning where the model marks it."""

    role: str = "assistant"
    content: str = ""
    citations: list[Citation] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the message as the next request sends it back."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of the `n` answers; `finish_reason` is "stop", "length" or "tool_calls"; `logprobs` as OpenAI has them."""

    index: int
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A whole answer; `session` has the id and the new version of its session; `details` holds all that was said."""

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
        """The passages the answer was given, in the order of their numbers."""
        return self.retrieval.passages if self.retrieval else []


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What a choice gained; `role` on its first chunk, `citations` on its last one; calls come whole."""

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
    """One chunk of a streamed answer; `event_id` is its place in the stream, where it has one."""

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
        """What the first choice gained, "" if it is not in this chunk."""
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
    """Read a list of citations; none is none."""
    found = payload if isinstance(payload, list) else []
    return [build(Citation, one, at=tuple(one.get("at") or (0, 0))) for one in found]


def tool_calls(payload: Any) -> list[ToolCall]:
    """Read a list of calls; none is none."""
    found = payload if isinstance(payload, list) else []
    return [
        build(ToolCall, {**(one.get("function") or {}), "id": one.get("id", "")}) for one in found
    ]


def retrieval(payload: Any) -> Retrieval | None:
    """Read what was retrieved; None where nothing was asked for."""
    if not isinstance(payload, dict):
        return None
    passages = [build(Passage, one) for one in payload.get("passages") or []]
    retrievals = [build(RetrievalRecord, one) for one in payload.get("retrievals") or []]
    stages = [build(StageRun, one) for one in payload.get("stages") or []]
    return build(Retrieval, payload, passages=passages, retrievals=retrievals, stages=stages)


def joined_retrieval(parts: Iterable[Retrieval | None]) -> Retrieval | None:
    """Return what a stream told of its retrievals as one; a part that came twice counts once."""
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
    """Read a whole chat answer; UnexpectedResponseError if it is none."""
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
    """Read one chunk of a chat stream; UnexpectedResponseError if it is none."""
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
    """Read a completion or a chunk of one; UnexpectedResponseError if it is none."""
    return Completion(
        **_common(payload),
        choices=[build(CompletionChoice, one) for one in items(payload, "choices")],
        usage=usage(payload.get("usage")),
        request_id=request_id,
        event_id=event_id,
    )
