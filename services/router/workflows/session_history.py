"""The history of a session that the next turn continues, from the session's record and turns."""

from __future__ import annotations

from collections.abc import Sequence

from common.registry.sessions import history_of
from common.wire.sessions import SessionRecord, Turn
from services.router.text.chats import SessionHistory


def session_history(
    record: SessionRecord, turns: Sequence[Turn], fingerprint: str | None
) -> SessionHistory:
    """Return the history, with tokens only if the model of `fingerprint` made them; None means without tokens."""
    return SessionHistory(
        session=record.id,
        version=record.version,
        model=record.model,
        ttl_s=record.ttl_s,
        said=[(turn.messages, turn.answer) for turn in turns],
        tokens=None if fingerprint is None else history_of(record, turns, fingerprint),
    )
