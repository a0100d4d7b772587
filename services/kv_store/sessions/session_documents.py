"""Session documents in the format `spillway.session/1`, which exports write and imports read.

Tokens are valid only for a model with the same fingerprint. An import for another model keeps only the messages, and
the next turn renders and tokenizes these again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from common.errors import InvalidRequest, TooLarge
from common.wire.retrievals import RetrievalRecord
from common.wire.sessions import SessionRecord, Turn

FORMAT = "spillway.session/1"
MAX_TURNS = 100_000
MAX_METADATA_BYTES = 65_536
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tokens = list[Token]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class MessageDocument(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message, with the fields that chat templates use."""

    role: Literal["system", "user", "assistant"]
    content: str
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")] | None = None


class TurnTokens(Struct, frozen=True, forbid_unknown_fields=True):
    """A turn in tokens: the number of tokens of earlier turns that it builds on, its prompt, and its answer."""

    history: Annotated[int, Meta(ge=0)]
    prompt: Tokens
    output: Tokens


class PassageDocument(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A passage that an answer rests on: characters [start, end) of a document; `text` if the client asked for it.

    In a document with pages, `page` is the page on which the passage begins, `page_starts` where further pages begin.
    """

    index: Annotated[int, Meta(ge=1, lt=1 << 31)]
    document_id: str
    chunk: Count
    start: Count
    end: Count
    score: Annotated[float, Meta(ge=-1e30, le=1e30)]
    text: str | None = None
    page: Count = 0
    page_starts: list[Count] = []


class RetrievalDocument(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The passages that a grounded answer rests on, as listed in its response; see `passages.shown`.

    `retrievals` list which passages were in the prompt at which time, if they were replaced during the answer.
    """

    collection: str
    found: Count
    passages: list[PassageDocument]
    extractive: bool = False
    approximate: bool = False
    retrievals: list[RetrievalRecord] = []


class TurnDocument(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn; `shown` are its messages as sent to the model, if passages were added; `at` is its end (s)."""

    messages: Annotated[list[MessageDocument], Meta(min_length=1)]
    answer: str
    finish: Annotated[str, Meta(max_length=40)] = "stop"
    at: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    shown: list[MessageDocument] | None = None
    partial: bool = False
    tokens: TurnTokens | None = None
    retrieval: RetrievalDocument | None = None


class SessionDocument(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole session; times in seconds since the epoch."""

    format: Literal["spillway.session/1"]
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    turns: Annotated[list[TurnDocument], Meta(max_length=MAX_TURNS)]
    fingerprint: Annotated[str, Meta(max_length=200)] = ""
    metadata: dict[str, Any] = {}
    ttl_s: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    id: Annotated[str, Meta(max_length=200)] = ""
    created: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    updated: Annotated[float, Meta(ge=0, le=1e11)] = 0.0


def turn_document(turn: Turn) -> TurnDocument:
    """Return the document of a stored turn."""
    return TurnDocument(
        messages=msgspec.json.decode(turn.messages, type=list[MessageDocument]),
        answer=turn.answer,
        finish=turn.finish,
        at=turn.at_ms / 1000,
        shown=msgspec.json.decode(turn.shown, type=list[MessageDocument]) if turn.shown else None,
        partial=turn.partial,
        tokens=TurnTokens(turn.history, turn.prompt, turn.output),
        retrieval=(
            msgspec.json.decode(turn.retrieval, type=RetrievalDocument) if turn.retrieval else None
        ),
    )


def exported(record: SessionRecord, turns: Sequence[TurnDocument]) -> SessionDocument:
    """Return the document of a session."""
    return SessionDocument(
        format="spillway.session/1",
        id=record.id,
        model=record.model,
        fingerprint=record.fingerprint,
        created=record.created_ms / 1000,
        updated=record.updated_ms / 1000,
        ttl_s=record.ttl_s,
        metadata=msgspec.json.decode(record.metadata),
        turns=list(turns),
    )


def read(body: bytes) -> SessionDocument:
    """Decode and check a document; InvalidRequest `invalid_session` names the fault's place."""
    try:
        document = msgspec.json.decode(body, type=SessionDocument)
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise _invalid(str(error)) from None
    size = len(msgspec.json.encode(document.metadata))
    if size > MAX_METADATA_BYTES:
        raise TooLarge(
            f"metadata is {size} bytes: at most {MAX_METADATA_BYTES} are allowed",
            code="session_too_large",
            param="metadata",
        )
    held = 0
    for index, turn in enumerate(document.turns):
        tokens = turn.tokens
        if tokens is None:
            held = -1
            continue
        if tokens.history and tokens.history != held:
            raise _invalid(
                f"turns[{index}].tokens.history is {tokens.history}: the turns before it hold "
                f"{max(held, 0)} tokens; expected that or 0"
            )
        held = tokens.history + len(tokens.prompt) + len(tokens.output)
    return document


def check_tokens(document: SessionDocument, vocabulary: int) -> None:
    """Raise InvalidRequest for token ids that the model does not have."""
    for index, turn in enumerate(document.turns):
        if turn.tokens is not None:
            largest = max((*turn.tokens.prompt, *turn.tokens.output), default=0)
            if largest >= vocabulary:
                raise _invalid(
                    f"turns[{index}].tokens holds id {largest}: the model has ids 0 to {vocabulary - 1}"
                )


def keeps_tokens(document: SessionDocument, fingerprint: str) -> bool:
    """Return whether a document's tokens are complete and belong to this model."""
    return document.fingerprint == fingerprint and all(turn.tokens for turn in document.turns)


def imported(document: SessionDocument, job: str, *, tokens: bool) -> list[Turn]:
    """Return the turns to store: with `tokens` their messages and tokens, else the messages only."""
    turns = []
    for index, turn in enumerate(document.turns):
        kept = turn.tokens if tokens else None
        turns.append(
            Turn(
                job=f"{job}.turn.{index}",
                history=kept.history if kept else 0,
                messages=msgspec.json.encode(turn.messages),
                answer=turn.answer,
                prompt=kept.prompt if kept else [],
                output=kept.output if kept else [],
                finish=turn.finish,
                at_ms=round(turn.at * 1000),
                shown=msgspec.json.encode(turn.shown) if turn.shown else b"",
                partial=turn.partial,
                retrieval=msgspec.json.encode(turn.retrieval) if turn.retrieval else b"",
            )
        )
    return turns


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"this is no session to import: {why}", code="invalid_session")
