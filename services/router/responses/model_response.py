"""Answers in the format of OpenAI's Responses API: the named events of a stream, or one whole response.

Both are made of the same pieces, so a whole response equals the last event of its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from common.errors import SpillwayError
from common.ids import time_of
from common.types.generation import Logprob
from common.wire.control import Applied
from common.wire.results import GenerateResult, Piece
from common.wire.sessions import Turn
from common.wire.workflows import AnswerMarks, ResponseOptions
from services.router.responses.answer_format import call_id, chat_logprob, read_whole, reader_of
from services.router.responses.tool_calls import Gained, ToolCall

PREFIX = "resp_"
_HEADS = ("response.created", "response.in_progress")
Kind = Literal["message", "reasoning", "function_call"]
Usage = tuple[
    int, int, int
]  # tokens of the prompt, cached tokens of the prompt, and tokens of the answer
# For each kind of item: the beginning of its id, the type of its part, and the beginning of its events' names.
_TEXTS = {
    "message": ("msg", "output_text", "response.output_text"),
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
}


class _Marks(Struct, frozen=True):
    marks: AnswerMarks | None = None


def marks_in(asked: bytes) -> AnswerMarks | None:
    """Return the marks in a stored response's answer, from the fields of its request that are kept."""
    return msgspec.json.decode(asked, type=_Marks).marks if asked else None


def response_id(session: str, job: str) -> str:
    """Return the id of a response: it names the session that keeps it, if any, and its job."""
    return f"{PREFIX}{session}~{_unique(job)}" if session else f"{PREFIX}{job}"


def session_of_response(name: str) -> tuple[str, str]:
    """Return the session and the unique part of the job that a stored response's id names; "" for other ids."""
    session, _, unique = name.removeprefix(PREFIX).rpartition("~")
    return (session, unique) if name.startswith(PREFIX) and session.count("~") == 2 else ("", "")


def _unique(job: str) -> str:
    return job.rsplit("~", 1)[-1]


class OutputItem(Struct):
    """One item of a response's output: a text with its tokens, or a call."""

    kind: Kind
    id: str
    text: str = ""
    logprobs: list[Logprob] = []
    call: ToolCall | None = None
    call_id: str = ""
    ended: bool = False

    def part(self) -> dict[str, Any]:
        """Return the one part of a text's content."""
        kind = _TEXTS[self.kind][1]
        if self.kind == "reasoning":
            return {"type": kind, "text": self.text}
        logprobs = [chat_logprob(one) for one in self.logprobs]
        return {"type": kind, "text": self.text, "annotations": [], "logprobs": logprobs}

    def shown(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        """Return the item as an object of the API; with `empty` without its text or arguments, as it begins."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            arguments = "" if empty else self.call.arguments
            return {**head, "call_id": self.call_id, "name": self.call.name, "arguments": arguments}
        content = [] if empty else [self.part()]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ModelResponse:
    """The response to one request, built from its pieces, each taken once and in order by `take` or `chunk`."""

    def __init__(self, job: str, options: ResponseOptions) -> None:
        self.options = options
        self._unique = _unique(job)
        self._id = response_id(options.session, job)
        self._created = time_of(self._unique[:26]) // 1000
        self._asked: dict[str, Any] = msgspec.json.decode(options.asked or b"{}")
        self._asked.pop("marks", None)
        self._reader = reader_of(options.marks)
        self._items: list[OutputItem] = []
        self._finish: str | None = None
        self._count = 0  # the number of events so far
        begun = {**self._body("in_progress"), "usage": None}
        self._heads = [self._event(kind, response=begun) for kind in _HEADS]

    def take(self, piece: Piece) -> None:
        """Add a piece."""
        self._taken(piece)

    def _taken(self, piece: Piece) -> list[bytes]:
        """Add a piece and return its events."""
        gained = Gained(piece.text)
        if self._reader is not None:
            gained = self._reader.read(piece.text, end=piece.finish is not None)
        self._finish = piece.finish or self._finish
        logprobs = piece.logprobs if self.options.logprobs >= 0 else []
        return list(self._gained(gained, logprobs))

    def _gained(self, gained: Gained, logprobs: list[Logprob]) -> Iterator[bytes]:
        if gained.reasoning:
            yield from self._text("reasoning", gained.reasoning, [])
        if gained.content or (logprobs and not gained.reasoning and not gained.calls):
            yield from self._text("message", gained.content, logprobs)
        for call in gained.calls:
            yield from self._called(call)

    def _text(self, kind: Kind, text: str, logprobs: list[Logprob]) -> Iterator[bytes]:
        last = self._items[-1] if self._items else None
        if last is None or last.kind != kind or last.ended:
            yield from self._closed()
            last = self._new(kind, _TEXTS[kind][0])
            yield self._added(last)
            yield self._event(
                "response.content_part.added", **self._place(), part={**last.part(), "text": ""}
            )
        last.text += text
        last.logprobs += logprobs
        more = {"logprobs": [chat_logprob(one) for one in logprobs]} if kind == "message" else {}
        yield self._event(f"{_TEXTS[kind][2]}.delta", **self._place(), delta=text, **more)

    def _called(self, call: ToolCall) -> Iterator[bytes]:
        """Yield the events of a call, which is sent whole."""
        yield from self._closed()
        at = sum(1 for item in self._items if item.call is not None)
        item = self._new("function_call", "fc")
        item.call, item.call_id = call, call_id(self._unique, at)
        yield self._added(item)
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", **place, delta=call.arguments)
        yield self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments)
        yield from self._closed()

    def _new(self, kind: Kind, prefix: str) -> OutputItem:
        item = OutputItem(kind, f"{prefix}_{self._unique}_{len(self._items)}", logprobs=[])
        self._items.append(item)
        return item

    def _closed(self, status: str = "completed") -> Iterator[bytes]:
        """Yield the events that end the last item, if it has not ended."""
        last = self._items[-1] if self._items else None
        if last is None or last.ended:
            return
        last.ended = True
        if last.call is None:
            part = last.part()
            more = {"logprobs": part["logprobs"]} if last.kind == "message" else {}
            done = f"{_TEXTS[last.kind][2]}.done"
            yield self._event(done, **self._place(), text=last.text, **more)
            yield self._event("response.content_part.done", **self._place(), part=part)
        index = len(self._items) - 1
        shown = last.shown(status)
        yield self._event("response.output_item.done", output_index=index, item=shown)

    # -- a stream --------------------------------------------------------------------------------------

    def heads(self) -> list[bytes]:
        """Return the events before the first token."""
        return self._heads

    def chunk(self, piece: Piece) -> bytes | None:
        """Take a piece and return its events, the last one with the piece's id; None if there is nothing to show."""
        events = self._taken(piece)
        if not events:
            return None
        return b"".join([*events[:-1], b"id: %d.%d\n" % (piece.at, piece.choice), events[-1]])

    def extended(self, _: Applied) -> None:
        """Ignore an extension of the prompt: responses have no passages."""

    def tail(self, result: GenerateResult) -> list[bytes]:
        """Return the events after the last token; the last one holds the whole response."""
        frames = [*self._ends()]
        whole = self._whole(result)
        return [*frames, self._event(f"response.{whole['status']}", response=whole)]

    def _ends(self) -> Iterator[bytes]:
        """Yield the events that end the output; an output without items gets an empty message."""
        if not self._items:
            yield from self._text("message", "", [])
        yield from self._closed(self._status())

    def _added(self, item: OutputItem) -> bytes:
        index, shown = len(self._items) - 1, item.shown("in_progress", empty=True)
        return self._event("response.output_item.added", output_index=index, item=shown)

    def _place(self) -> dict[str, Any]:
        index = len(self._items) - 1
        return {"item_id": self._items[-1].id, "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))

    # -- one response ----------------------------------------------------------------------------------

    def whole(self, result: GenerateResult) -> bytes:
        """Return the whole response as JSON, from all pieces taken."""
        list(self._ends())
        return msgspec.json.encode(self._whole(result))

    def kept(self, turn: Turn) -> bytes:
        """Return a response as JSON from the turn that its session keeps; cached tokens are reported as 0."""
        self._finish = turn.finish
        list(self._gained(read_whole(self.options.marks, turn.answer), []))
        list(self._ends())
        read, wrote = turn.usage
        counts = (read, 0, wrote)
        return msgspec.json.encode(self._ended(counts))

    def _whole(self, result: GenerateResult) -> dict[str, Any]:
        counts = (result.prompt_tokens, result.cached_tokens, result.completion_tokens)
        body = self._ended(counts)
        if self.options.session:
            body["session"] = {"id": self.options.session, "version": result.version}
        return body

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _ended(self, counts: Usage) -> dict[str, Any]:
        body = self._body(self._status())
        if self._finish == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["usage"] = _usage(*counts)
        return body

    def _body(self, status: str) -> dict[str, Any]:
        last = len(self._items) - 1
        output = [
            item.shown(status if at == last else "completed") for at, item in enumerate(self._items)
        ]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.options.model,
            "output": output,
            **self._asked,
        }


def _usage(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }


def error_event(error: SpillwayError, body: dict[str, Any]) -> bytes:
    """Return an error as the last event of a stream, with the Responses API's fields beside those of `body`."""
    event = {
        "type": "error",
        "code": error.code,
        "message": body["error"]["message"],
        "param": error.param,
        **body,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
