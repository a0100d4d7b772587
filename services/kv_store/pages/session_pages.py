"""The pages that a session's turns filled, computed from their tokens."""

from __future__ import annotations

from common.bus import Bus
from common.pages.chain import Chain
from common.pages.identity import PageId, root_id, short_context
from common.registry.sessions import Sessions
from common.wire.message import decode
from common.wire.sessions import Turn

_AT_ONCE = 32


async def session_pages(bus: Bus, session: str) -> list[PageId]:
    """Return the ids of all full pages of a session's turns; none if the session has no record."""
    record = await Sessions(bus).stored(session)
    if record is None:
        return []
    fingerprint = record.fingerprint
    found = Chain(root_id(fingerprint, record.tenant), short_context(fingerprint))
    start = 0
    while rows := await Sessions(bus).encoded_turns(session, start, _AT_ONCE):
        start += len(rows)
        for turn in (decode(row, Turn) for row in rows):
            found.add(turn)
    return list(found.places)
