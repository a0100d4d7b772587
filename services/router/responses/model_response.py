"""Answers in the format of OpenAI's Responses API: the named events of a stream, or one whole response.

Both are made of the same pieces, so a whole response equals the last event of its stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import SpillwayError
from common.ids import time_of, unique_of
from common.wire.results import GenerateResult, Piece
from common.wire.sessions import Turn
from common.wire.workflows import ResponseOptions
from services.router.responses.answer_format import ChoiceText, chat_logprob

PREFIX = "resp_"
_HEADS = ("created", "in_progress")
Usage = tuple[
    int, int, int
]  # tokens of the prompt, those of them that were cached, and tokens of the answer


def response_id(session: str, job: str) -> str:
    """Return the id of a response: it names the session that keeps it, if any, and its job."""
    return f"{PREFIX}{session}~{unique_of(job)}" if session else f"{PREFIX}{job}"


def session_of_response(name: str) -> tuple[str, str]:
    """Return the session and the unique part of the job that a stored response's id names; "" for other ids."""
    session, _, unique = name.removeprefix(PREFIX).rpartition("~")
    return (session, unique) if name.startswith(PREFIX) and session.count("~") == 2 else ("", "")


class ModelResponse:
    """The response to one request, built of its pieces, each taken once and in order (`take`)."""

    def __init__(self, job: str, options: ResponseOptions) -> None:
        self.options, self.said = options, ChoiceText(logprobs=[])
        unique = unique_of(job)
        self._id, self._item = response_id(options.session, job), f"msg_{unique}"
        self._created = time_of(unique) // 1000
        self._asked: dict[str, Any] = msgspec.json.decode(options.asked or b"{}")
        self._events = 0

    def take(self, piece: Piece) -> ChoiceText:
        """Add a piece and return what was said so far."""
        said = self.said
        said.text += piece.text
        said.finish = piece.finish or said.finish
        if self.options.logprobs >= 0:
            said.logprobs += [(logprob, 0) for logprob in piece.logprobs]
        return said

    # -- a stream --------------------------------------------------------------------------------------

    def heads(self) -> list[bytes]:
        """Return the events before the first token."""
        begun = {**self._body("in_progress", []), "usage": None}
        frames = [self._event(f"response.{name}", response=begun) for name in _HEADS]
        item = {**self._message("in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            *frames,
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def chunk(self, piece: Piece) -> bytes | None:
        """Take a piece and return its event with its id; None if it has nothing to show."""
        said = self.take(piece)
        self._events = max(
            self._events, len(_HEADS) + 2
        )  # a stream that is resumed has had its heads
        fresh = said.logprobs[-len(piece.logprobs) :] if piece.logprobs else []
        if not piece.text and not fresh:
            return None
        shown = [chat_logprob(one) for one, _ in fresh]
        kind = "response.output_text.delta"
        event = self._event(kind, **self._place(), delta=piece.text, logprobs=shown)
        return b"id: %d.%d\n" % (piece.at, piece.choice) + event

    def tail(self, result: GenerateResult) -> list[bytes]:
        """Return the events after the last token; the last one holds the whole response."""
        whole, place = self._whole(result), self._place()
        self._events = max(self._events, len(_HEADS) + 2)
        item = whole["output"][0]
        part = item["content"][0]
        logprobs = part["logprobs"]
        done = "response.output_text.done"
        return [
            self._event(done, **place, text=self.said.text, logprobs=logprobs),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))

    # -- one response ----------------------------------------------------------------------------------

    def whole(self, result: GenerateResult) -> bytes:
        """Return the whole response as JSON, from all pieces taken."""
        return msgspec.json.encode(self._whole(result))

    def kept(self, turn: Turn) -> bytes:
        """Return a response as JSON from the turn that its session keeps; what was cached is not known any more."""
        self.said.text, self.said.finish = turn.answer, turn.finish
        return msgspec.json.encode(
            self._ended((turn.history + len(turn.prompt), 0, len(turn.output)))
        )

    def _whole(self, result: GenerateResult) -> dict[str, Any]:
        counts = (result.prompt_tokens, result.cached_tokens, result.completion_tokens)
        body = self._ended(counts)
        if self.options.session:
            body["session"] = {"id": self.options.session, "version": result.version}
        return body

    def _ended(self, counts: Usage) -> dict[str, Any]:
        status = "incomplete" if self.said.finish == "length" else "completed"
        body = self._body(status, [self._message(status)])
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["usage"] = _usage(*counts)
        return body

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
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

    def _message(self, status: str) -> dict[str, Any]:
        logprobs = [chat_logprob(one) for one, _ in self.said.logprobs]
        part = {
            "type": "output_text",
            "text": self.said.text,
            "annotations": [],
            "logprobs": logprobs,
        }
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
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
    """Return an error as the last event of a stream, with the fields of such an event beside the stream's `body`."""
    event = {
        "type": "error",
        "code": error.code,
        "message": body["error"]["message"],
        "param": error.param,
        **body,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
