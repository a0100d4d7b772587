"""Sessions: records, turns, and the jobs that kv_store does on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.wire.message import Message


class SessionTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The turn a generation is: `finish` appends it to its session, if that still stands at `version`.

    `history` counts the tokens at the head of the prompt that the session has already (0: the history is replaced);
    `messages` is the JSON list of this turn's messages as rendered, `shown` as the client sent them (empty: the same).
    `retrieval` is the JSON object of that name of a grounded answer's response (empty: not grounded), `asked` the JSON
    fields that a response of /v1/responses repeats of its request (empty: it is none).
    """

    session: str
    version: int
    history: int
    messages: bytes
    shown: bytes = b""
    retrieval: bytes = b""
    ttl_s: int = 0
    keep_partial: bool = False
    asked: bytes = b""


class SessionWork(Message, frozen=True, tag="session"):
    """A session's cold life, done by kv_store: list a tenant's; export, import, delete, pin or unpin one.

    `body` is the exported document of an import, `ttl_s` how long what it makes is kept after its last turn; `session`
    is the id (the new one's, for an import). `turn` is the job of the turn to delete alone (empty: the whole session).
    """

    op: Literal["list", "export", "import", "delete", "pin", "unpin", "places"]
    tenant: str
    session: str = ""
    cursor: str | None = None
    limit: int = 100
    body: bytes = b""
    ttl_s: int = 0
    turn: str = ""


class SessionResult(Message, frozen=True, tag="session"):
    """kv_store's answer as JSON: a page of sessions, an exported document, a session, or a proof of deletion."""

    body: bytes


class Turn(Message, frozen=True):
    """One finished turn of a session: its messages, its answer, and their tokens.

    A session's tokens are those of all turns since the last one that replaced the history (`history` 0): each turn's
    `prompt` (without the history) and `output` (without the token that stopped it). `partial` is a turn that was
    cancelled or failed and kept. `retrieval` and `asked` are as in SessionTurn. `counted` are how many tokens the model
    read and wrote in a turn whose tokens are gone, since an earlier turn, which they repeat, was deleted.
    """

    job: str
    history: int
    messages: bytes
    answer: str
    prompt: list[int]
    output: list[int]
    finish: str
    at_ms: int
    shown: bytes = b""
    partial: bool = False
    retrieval: bytes = b""
    asked: bytes = b""
    counted: tuple[int, int] = (0, 0)

    @property
    def usage(self) -> tuple[int, int]:
        """The tokens that the model read, with those of earlier turns, and wrote."""
        if self.prompt or self.output:
            return self.history + len(self.prompt), len(self.output)
        return self.counted


class SessionRecord(Message, frozen=True):
    """A session as stored, without its turns; `busy` is the job that holds its turn lock.

    `pinned`: its pages are not evicted from Redis.
    """

    id: str
    tenant: str
    model: str
    fingerprint: str
    version: int
    tokens: int
    turns: int
    ttl_s: int
    created_ms: int
    updated_ms: int
    metadata: bytes = b"{}"
    busy: str = ""
    deleted: bool = False
    pinned: bool = False


def shown(record: SessionRecord) -> dict[str, Any]:
    """Return a session without its turns as JSON values; `created` and `updated` are seconds since the epoch."""
    return {
        "object": "session",
        "id": record.id,
        "model": record.model,
        "created": record.created_ms // 1000,
        "updated": record.updated_ms // 1000,
        "ttl_s": record.ttl_s,
        "pinned": record.pinned,
        "version": record.version,
        "turns": record.turns,
        "tokens": record.tokens,
        "metadata": msgspec.json.decode(record.metadata),
    }


def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's shape, as its client sent it.

    Answers say how they ended, and grounded ones what they rest on (`retrieval`, as their response did).
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        found += msgspec.json.decode(turn.shown or turn.messages)
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": turn.answer,
            "finish_reason": turn.finish,
        }
        if turn.partial:
            answer["partial"] = True
        if turn.retrieval:
            answer["retrieval"] = msgspec.json.decode(turn.retrieval)
        found.append(answer)
    return found
