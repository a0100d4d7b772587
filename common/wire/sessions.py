"""Sessions: records, turns, and the jobs that kv_store runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.wire.message import Message


class SessionTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The turn of a generation: `finish` appends it to its session, if the session still has this `version`.

    `history` counts the tokens at the head of the prompt that the session has already (0: the history is replaced);
    `messages` is the JSON list of this turn's messages as rendered, `shown` as the client sent them (empty: the same).
    `retrieval` is the JSON object of that name of a grounded answer's response (empty: not grounded), `asked` the JSON
    fields of its request that a response of /v1/responses repeats (empty: another path).
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
    """A job of kv_store: list a tenant's sessions; export, import, delete, pin or unpin one session.

    `body` is the exported document to import, and `ttl_s` the seconds that the imported session lives after its last
    turn. `session` is the session's id, for an import the new one's. `turn` is the job of the only turn to delete
    (empty: the whole session).
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
    cancelled or failed and kept. `retrieval` and `asked` are as in SessionTurn. `counted` are the numbers of tokens
    that the model read and wrote in a turn whose tokens were removed, since they repeated an earlier turn that was
    deleted.
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
        """The numbers of tokens that the model read, with those of earlier turns, and wrote."""
        if self.prompt or self.output:
            return self.history + len(self.prompt), len(self.output)
        return self.counted


class SessionRecord(Message, frozen=True):
    """A session as stored, without its turns; `busy` is the job that holds its turn lock.

    The pages of a `pinned` session are not evicted from Redis.
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

    Answers have their reason to finish, and grounded ones the `retrieval` of their response.
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
