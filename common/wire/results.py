"""Results of jobs, and the events before them: one tagged union."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.errors import SpillwayError
from common.types.generation import FinishReason, Logprob
from common.wire.control import Applied
from common.wire.message import Message, _checked, decode
from common.wire.search import CopyResult, DocumentsResult, SearchResult
from common.wire.sessions import SessionResult
from common.wire.workflows import RequestResult


class EmbedResult(Message, frozen=True, tag="embed"):
    """`vectors` holds one float32 row of `dimension` per text, in the order asked."""

    dimension: int
    vectors: bytes
    tokens: int


class ScoreResult(Message, frozen=True, tag="score"):
    """One score per document, in the order asked; `raw` before the sigmoid, where there is one."""

    scores: list[float]
    raw: list[float]
    tokens: int


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new output of one choice in one event: tokens, and the text that is certain by now.

    `at` is the index of the event in which the piece was first logged: so a folded log still shows which pieces a
    client has. `finish` is set on a choice's last piece; `stopped_by` is the stop string or the text of the stop token.
    """

    at: int
    choice: int
    tokens: list[int] = []
    text: str = ""
    finish: FinishReason | None = None
    stopped_by: str | None = None
    logprobs: list[Logprob] = []


class Delta(Message, frozen=True, tag="delta"):
    """The data of a generation's progress event: pieces in rising order of (at, choice), and extensions of the prompt.

    Extensions are in the order of their effect, in the event of the tokens after them, or in an earlier event.
    """

    pieces: list[Piece]
    applied: list[Applied] = []


class GenerateResult(Message, frozen=True, tag="generate"):
    """A generation's outcome; its text is in the progress events before. `cached` prompt tokens were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    version: int | None = None


Result = (
    EmbedResult
    | ScoreResult
    | SearchResult
    | DocumentsResult
    | CopyResult
    | RequestResult
    | GenerateResult
    | SessionResult
)


Outcome = Literal["result", "error", "expired", "cancelled", "dead"]


class ErrorDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """The HTTP answer to an error outcome: status, field at fault, and seconds after which a retry may succeed."""

    status: int
    param: str | None = None
    retry_after_s: float | None = None


class Event(Message, frozen=True):
    """One entry of a job's log; `index` counts from 0 without gaps.

    `kind` is "progress" or an outcome, which ends the job; `data` is an encoded Result or progress of the
    service; `code`, `message` and `error` describe an error outcome. Logs that earlier versions wrote have no
    `error`: there `data` may be JSON with `retry_after_s`.
    """

    index: int
    kind: Literal["progress", "result", "error", "expired", "cancelled", "dead"]
    data: bytes = b""
    code: str = ""
    message: str = ""
    error: ErrorDetails | None = None

    @property
    def ends(self) -> bool:
        """True if the job is over with this event."""
        return self.kind != "progress"


def error_event(index: int, kind: Outcome, error: SpillwayError) -> Event:
    """Return the event that ends a job with an error, with all facts for its client."""
    details = ErrorDetails(
        status=error.http_status, param=error.param, retry_after_s=error.retry_after_s
    )
    return Event(index=index, kind=kind, code=error.code, message=error.message, error=details)


_result = msgspec.msgpack.Decoder(Result)


def decode_delta(data: bytes) -> Delta:
    """Decode the data of a generation's progress event; BadMessage for other bytes."""
    return decode(data, Delta)


def decode_result(data: bytes) -> Result:
    """Decode a result by its tag; BadMessage for other bytes."""
    result: Result = _checked(_result, "result", data)
    return result
