"""Answers in OpenAI's format, made of a generation's pieces: the chunks of a stream, or one whole answer.

Both are made of the same pieces, so a whole answer equals its stream.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from common.ids import time_of
from common.types.generation import Logprob
from common.wire.control import Applied
from common.wire.results import GenerateResult, Piece
from common.wire.retrievals import RetrievalHistory
from common.wire.workflows import AnswerMarks, ResponseOptions
from services.router.responses.tool_calls import (
    THINK,
    THOUGHT,
    AnswerReader,
    Gained,
    ReasoningSplitter,
    ToolCall,
    ToolCallParser,
)
from services.router.text.passages import Passage, cited

# JSON has no minus infinity: this is the number that OpenAI reports for a token that could not have been drawn.
_IMPOSSIBLE = -9999.0
DONE = b"data: [DONE]\n\n"
Position = tuple[int, int]


class ChoiceText(Struct):
    """The text and tokens of one choice so far."""

    text: str = ""
    finish: str | None = None
    stopped_by: str | None = None
    tokens: int = 0
    shown: int = 0  # characters of all tokens so far, for text_offset
    logprobs: list[tuple[Logprob, int]] = []
    reasoning: str = ""
    calls: list[ToolCall] = []
    gained: Gained = Gained()  # from the last piece


class AnswerFormat:
    """The answer to one request, built from its pieces, each of which is taken once and in order (`take`)."""

    def __init__(
        self, request: str, options: ResponseOptions, rests: RetrievalHistory | None = None
    ) -> None:
        """`rests` is the history of retrievals of a grounded answer."""
        self.options, self.rests = options, rests
        self.chat = options.kind == "chat"
        self.said = [ChoiceText(logprobs=[], calls=[]) for _ in range(options.choices)]
        self._readers = [reader_of(options.marks) for _ in self.said]
        self._unique = unique = request.rsplit("~", 1)[-1][:26]
        kind = "chat.completion" if self.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{unique}",
            "object": kind,
            "created": time_of(unique) // 1000,
            "model": options.model,
            "system_fingerprint": f"fp_{options.fingerprint[:10]}" if options.fingerprint else None,
        }

    def take(self, piece: Piece) -> ChoiceText | None:
        """Add a piece to its choice and return the choice; None for a choice that the request does not have."""
        if piece.choice >= len(self.said):
            return None
        said = self.said[piece.choice]
        reader, gained = self._readers[piece.choice], Gained(piece.text)
        if reader is not None:
            gained = reader.read(piece.text, end=piece.finish is not None)
        said.gained = gained
        said.text += gained.content
        said.reasoning += gained.reasoning
        said.calls += gained.calls
        said.tokens += len(piece.tokens)
        said.finish = piece.finish or said.finish
        if said.finish == "stop" and said.calls:
            said.finish = "tool_calls"
        said.stopped_by = piece.stopped_by or said.stopped_by
        if self.options.logprobs >= 0:
            for logprob in piece.logprobs:
                said.logprobs.append((logprob, said.shown))
                said.shown += len(_text(logprob))
        return said

    # -- a stream --------------------------------------------------------------------------------------

    def heads(self) -> list[bytes]:
        """Return the chunks that begin the choices: the role in a chat, or a completion's prompt if it is echoed."""
        frames = []
        for index in range(self.options.choices):
            if self.chat:
                delta = {"role": "assistant", "content": "", "refusal": None}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            elif self.options.echo:
                text = self.echoed(index)
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            else:
                return []
            first = {"retrieval": self.rests.shown} if self.rests and not index else {}
            frames.append(self._frame([choice], **first))
        return frames

    def extended(self, applied: Applied) -> bytes | None:
        """Take an extension of the prompt; return a chunk with its retrieval, None if there is no new one."""
        told = self.rests.take(applied) if self.rests is not None else None
        if told is None:
            return None
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        return self._frame([choice], retrieval=told)

    def chunk(self, piece: Piece) -> bytes | None:
        """Take a piece and return its chunk with its id; None if there is nothing to show yet."""
        said = self.take(piece)
        if said is None:
            return None
        told = piece.finish or (piece.logprobs and self.options.logprobs >= 0)
        if not (told or any(said.gained)):
            return None
        fresh = said.logprobs[-len(piece.logprobs) :] if piece.logprobs else []
        choice: dict[str, Any] = {"index": piece.choice}
        if self.chat:
            delta = self._delta(piece.choice, said)
            if piece.finish and self.rests is not None:
                delta["citations"] = _citations(self.rests, said.text)
            choice["delta"] = delta
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(fresh)
        choice["finish_reason"] = said.finish if piece.finish else None
        if piece.finish and piece.stopped_by is not None:
            choice["stop_reason"] = piece.stopped_by
        return b"id: %d.%d\n" % (piece.at, piece.choice) + self._frame([choice])

    def _delta(self, index: int, said: ChoiceText) -> dict[str, Any]:
        """Return the part of a choice's message that the last piece added."""
        gained, delta = said.gained, dict[str, Any]()
        if gained.reasoning:
            delta["reasoning_content"] = gained.reasoning
        if gained.content:
            delta["content"] = gained.content
        if gained.calls:
            first = len(said.calls) - len(gained.calls)
            delta["tool_calls"] = [
                {"index": first + at, **self._call(index, first + at, call)}
                for at, call in enumerate(gained.calls)
            ]
        return delta

    def _call(self, index: int, at: int, call: ToolCall) -> dict[str, Any]:
        """Return a call as OpenAI's object, with an id that is the same for every reader of the request."""
        function = {"name": call.name, "arguments": call.arguments}
        name = call_id(self._unique, at, index)
        return {"id": name, "type": "function", "function": function}

    def usage_chunk(self, result: GenerateResult) -> bytes:
        """Return the chunk that ends a stream whose client asked for its usage."""
        return self._frame([], usage=usage(result), **self._session(result))

    def tail(self, result: GenerateResult) -> list[bytes]:
        """Return the frames that end a stream: the usage if the client asked for it, and OpenAI's last line."""
        return [*([self.usage_chunk(result)] if self.options.include_usage else []), DONE]

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self.chat:
            chunk["object"] = "chat.completion.chunk"
        if self.options.include_usage:
            chunk["usage"] = None
        return b"data: %s\n\n" % msgspec.json.encode(chunk | more)

    # -- one answer ------------------------------------------------------------------------------------

    def whole(self, result: GenerateResult) -> bytes:
        """Return the whole answer as JSON, from all pieces taken."""
        choices = [self._choice(index, said) for index, said in enumerate(self.said)]
        body = {**self._head, "choices": choices, "usage": usage(result), **self._session(result)}
        if self.rests is not None:
            body["retrieval"] = self.rests.shown
        return msgspec.json.encode(body)

    def _choice(self, index: int, said: ChoiceText) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
            if said.reasoning:
                message["reasoning_content"] = said.reasoning
            if said.calls:
                message["content"] = said.text or None
                message["tool_calls"] = [
                    self._call(index, at, call) for at, call in enumerate(said.calls)
                ]
            if self.rests is not None:
                message["citations"] = _citations(self.rests, said.text)
            choice["message"] = message
        else:
            choice["text"] = self.echoed(index) + said.text
        choice["logprobs"] = self._logprobs(said.logprobs)
        choice["finish_reason"] = said.finish
        if said.stopped_by is not None:
            choice["stop_reason"] = said.stopped_by
        return choice

    def echoed(self, index: int) -> str:
        """Return the prompt that a completion's choice repeats; "" without `echo`."""
        echo = self.options.echo
        return echo[index * len(echo) // self.options.choices] if echo else ""

    def _session(self, result: GenerateResult) -> dict[str, Any]:
        if not self.options.session:
            return {}
        return {"session": {"id": self.options.session, "version": result.version}}

    def _logprobs(self, fresh: list[tuple[Logprob, int]]) -> dict[str, Any] | None:
        if self.options.logprobs < 0:
            return None
        if self.chat:
            return {"content": [chat_logprob(one) for one, _ in fresh], "refusal": None}
        return {
            "tokens": [_text(one) for one, _ in fresh],
            "token_logprobs": [_finite(one.logprob) for one, _ in fresh],
            "top_logprobs": [{_text(t): _finite(t.logprob) for t in one.top} for one, _ in fresh],
            "text_offset": [offset for _, offset in fresh],
        }


def _citations(rests: RetrievalHistory, answer: str) -> list[dict[str, Any]]:
    passages = msgspec.convert(rests.shown["passages"], list[Passage])
    return [msgspec.to_builtins(one) for one in cited(answer, passages)]


def reader_of(marks: AnswerMarks | None) -> AnswerReader | None:
    """Return the reader of one choice's text; None if the whole text is content."""
    if marks is None:
        return None
    opened = marks.reasoning == "opened"
    splitter = ReasoningSplitter(opened=opened) if marks.reasoning else None
    parser = None if marks.format is None else ToolCallParser(marks.format, marks.names)
    return AnswerReader(splitter, parser)


def read_whole(marks: AnswerMarks | None, answer: str) -> Gained:
    """Return the parts of a whole answer; its reasoning has no first mark if the prompt ended with that mark."""
    if marks is not None and marks.reasoning:
        thought, ended, _ = answer.partition(THOUGHT)
        opened = bool(ended) and THINK not in thought
        marks = msgspec.structs.replace(marks, reasoning="opened" if opened else "marked")
    reader = reader_of(marks)
    return Gained(answer) if reader is None else reader.read(answer, end=True)


def call_id(unique: str, at: int, choice: int = 0) -> str:
    """Return the id of call number `at` of a job's choice; `unique` is the job's unique part."""
    digest = hashlib.blake2b(f"{unique} {choice} {at}".encode(), digest_size=8).hexdigest()
    return digest[:9]


def usage(result: GenerateResult) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


def _finite(value: float) -> float:
    return max(value, _IMPOSSIBLE)


def _text(logprob: Logprob) -> str:
    return logprob.raw.decode("utf-8", "replace")


def chat_logprob(one: Logprob) -> dict[str, Any]:
    """Return a token's logprob in the form of chats and responses, with the likeliest tokens."""
    shown: dict[str, Any] = {
        "token": _text(one),
        "logprob": _finite(one.logprob),
        "bytes": list(one.raw),
    }
    shown["top_logprobs"] = [
        {"token": _text(top), "logprob": _finite(top.logprob), "bytes": list(top.raw)}
        for top in one.top
    ]
    return shown
