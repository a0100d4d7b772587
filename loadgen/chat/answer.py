"""One streamed answer, assembled from its chunks, with the faults of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadgen.chat.frames import Frame

Mark = tuple[int, int]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    citations: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    retrieval: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Chunk)


def mark_of(ident: str) -> Mark | None:
    """Return (event, choice) of a chunk's id `event.choice`; None for other text."""
    event, dot, choice = ident.partition(".")
    if dot and event.isdigit() and choice.isdigit():
        return int(event), int(choice)
    return None


def _joined(before: dict[str, Any] | None, told: dict[str, Any]) -> dict[str, Any]:
    """Return the `retrieval` object so far: a later chunk's passages and retrievals are added to the earlier ones."""
    if before is None:
        return told
    passages = {each["index"]: each for each in (*told["passages"], *before["passages"])}
    every = (*before.get("retrievals", ()), *told.get("retrievals", ()))
    retrievals = {each["at_token"]: each for each in every}
    return {
        **before,
        "passages": [passages[index] for index in sorted(passages)],
        "retrievals": [retrievals[token] for token in sorted(retrievals)],
    }


@dataclass(slots=True)
class StreamedAnswer:
    """The answer to one request; `code` is empty if it ended well, `status` 0 without an HTTP answer.

    `at_s` holds the moment at which each piece came (monotonic), `wrong` the stream's faults: a repeated piece with
    another text, a piece out of order, an unreadable chunk, an end without a finish.
    """

    request: str = ""
    status: int = 0
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    at_s: list[float] = field(default_factory=list)
    last: Mark | None = None
    tries: int = 0
    resumes: int = 0
    repeated: int = 0
    done: bool = False
    retrieval: dict[str, Any] | None = None
    citations: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _seen: dict[Mark, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if the answer is whole and its stream had no faults."""
        return self.done and not self.code and not self.wrong

    @property
    def text(self) -> str:
        """Return the first choice's text."""
        return self.texts.get(0, "")

    @property
    def last_id(self) -> str:
        """Return the Last-Event-ID with which to go on; empty before the first piece."""
        return "" if self.last is None else f"{self.last[0]}.{self.last[1]}"

    def take(self, frame: Frame, now: float) -> None:
        """Add one frame."""
        if frame.data == b"[DONE]":
            if not self.finish:
                self.wrong.append("the stream ended without a finish_reason")
            self.done = True
            return
        try:
            chunk = _decoder.decode(frame.data)
        except msgspec.MsgspecError as error:
            self.wrong.append(f"not a chunk ({error}): {frame.data[:80]!r}")
            return
        if chunk.error is not None:
            self.fail(str(chunk.error.get("code")), str(chunk.error.get("message")))
            return
        if chunk.usage is not None and chunk.usage.completion_tokens:
            self._usage(chunk.usage)
        if chunk.retrieval is not None:
            self.retrieval = _joined(self.retrieval, chunk.retrieval)
        mark = mark_of(frame.id)
        if mark is None:
            self._unmarked(frame, chunk)
        else:
            self._piece(mark, chunk, now)

    def fail(self, code: str, message: str = "") -> None:
        """Record the error that ended the request."""
        self.code, self.message, self.done = code, message, True

    def _usage(self, usage: _Usage) -> None:
        self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens = (usage.prompt_tokens_details or {}).get("cached_tokens", 0)

    def _unmarked(self, frame: Frame, chunk: _Chunk) -> None:
        if any(choice.delta.content or choice.text for choice in chunk.choices):
            self.wrong.append(f"text without an event id: {frame.data[:80]!r}")

    def _piece(self, mark: Mark, chunk: _Chunk, now: float) -> None:
        text = "".join(choice.delta.content or choice.text or "" for choice in chunk.choices)
        if mark in self._seen:
            self.repeated += 1
            if self._seen[mark] != text:
                self.wrong.append(
                    f"piece {mark} changed from {self._seen[mark][:40]!r} to {text[:40]!r}"
                )
            return
        if self.last is not None and mark < self.last:
            self.wrong.append(f"piece {mark} came after piece {self.last}")
        self._seen[mark], self.last = text, mark
        self.at_s.append(now)
        for choice in chunk.choices:
            if choice.index in self.finish:
                self.wrong.append(f"piece {mark} came after its choice had finished")
            self.texts[choice.index] = self.texts.get(choice.index, "") + text
            if choice.finish_reason:
                self.finish[choice.index] = choice.finish_reason
            self.citations += choice.delta.citations or []
            self.logprobs += (choice.logprobs or {}).get("content") or []
