"""A session's record and turns as what a template continues."""

from __future__ import annotations

from collections.abc import Sequence

from common.registry.sessions import history_of
from common.wire.sessions import SessionRecord, Turn
from services.router.text.chats import SessionHistory


def past(record: SessionRecord, turns: Sequence[Turn], fingerprint: str | None) -> SessionHistory:
    """Return what was said; its tokens only where the model of `fingerprint` (None: unknown) made them."""
    return SessionHistory(
        session=record.id,
        version=record.version,
        model=record.model,
        ttl_s=record.ttl_s,
        said=[(turn.messages, turn.answer) for turn in turns],
        tokens=None if fingerprint is None else history_of(record, turns, fingerprint),
    )
