"""What a generate job says, piece by piece: from its log and its router's journal, each piece once, in order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from common.bus import Notifications
from common.bus.events import Subscription
from common.errors import DeadlineExceeded
from common.wire.results import Event, Piece, decode_delta, error_event

# The bell rings for every step; the log is looked at only where it may have been missed.
LOOK_S = 2.0


async def follow(
    journal: Notifications, job: str, deadline_ms: int, bell: Subscription | None = None
) -> AsyncGenerator[Piece | Event, None]:
    """Yield every piece of a job from its first, in rising order of (at, choice), then its outcome.

    A folded log is told apart by what was seen. If the deadline passes first the outcome is an "expired" event made
    here. A `bell` that was there before the job was admitted spares the first look at the log.
    """
    seen = (-1, -1)
    events = journal.events(job, 0, deadline_ms, bell, look_s=LOOK_S)
    async with contextlib.aclosing(events):
        async for event in events:
            if event.ends:
                yield event
                return
            for piece in decode_delta(event.data).pieces:
                if (piece.at, piece.choice) > seen:
                    seen = (piece.at, piece.choice)
                    yield piece
    late = DeadlineExceeded("the deadline passed before the answer was complete")
    yield error_event(-1, "expired", late)
