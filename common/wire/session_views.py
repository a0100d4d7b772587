"""A session as its owner sees it, for the API and for what kv_store answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.wire.sessions import SessionRecord, Turn


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
