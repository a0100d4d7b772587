"""Sources of answers: the generate job from which an answer is read, and the job's pieces in order.

A plain generation is its own generate job; a grounded request names its generate job as progress.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import NamedTuple

from common.bus import Bus, Notifications
from common.bus.events import Subscription
from common.errors import DeadlineExceeded, NotFound
from common.wire.control import Applied
from common.wire.results import Delta, Event, Piece, decode_delta, error_event
from common.wire.retrievals import RetrievalHistory
from common.wire.workflows import ResponseOptions, decode_options
from services.router.cards import Cards
from services.router.responses.outcomes import error_of
from services.router.workflows.progress import (
    GroundedProgress,
    await_grounded_progress,
    grounded_options,
)

# A notification comes for every step; the log is read after this time, since a notification may be missed.
LOOK_S = 2.0
_SEVERAL_JOBS = "request~"


class AnswerSource(NamedTuple):
    """A generate job, the subscription made before its admission, and the history of a grounded answer's retrievals."""

    job: str
    subscription: Subscription | None = None
    rests: RetrievalHistory | None = None


SourceLookup = Callable[[], Awaitable[AnswerSource]]


AnswerEvent = Piece | Applied | Event


async def follow(
    notifications: Notifications,
    job: str,
    deadline_ms: int,
    subscription: Subscription | None = None,
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield every piece of a generate job once, in rising order of (at, choice), then the job's outcome.

    An extension of the prompt comes before the piece whose tokens follow it. Pieces of a folded log that were yielded
    before are left out. If the deadline passes first, the outcome is an "expired" event made by this function. A
    `subscription` made before the job's admission spares the first look at the log.
    """
    order = _Order()
    events = notifications.events(job, 0, deadline_ms, subscription, look_s=LOOK_S)
    async with contextlib.aclosing(events):
        async for event in events:
            if event.ends:
                for applied in order.rest():
                    yield applied
                yield event
                return
            for item in order.taken(decode_delta(event.data)):
                yield item
    late = DeadlineExceeded("the deadline passed before the answer was complete")
    yield error_event(-1, "expired", late)


class _Order:
    """Puts an answer's pieces and the extensions of its prompt in order, each once, as deltas arrive."""

    def __init__(self) -> None:
        self._seen, self._extended, self._tokens = (-1, -1), 0, 0
        self._waiting: deque[Applied] = deque()

    def taken(self, delta: Delta) -> Iterator[Piece | Applied]:
        for applied in delta.applied:
            if applied.extension.number > self._extended:
                self._extended = applied.extension.number
                self._waiting.append(applied)
        for piece in delta.pieces:
            if (piece.at, piece.choice) <= self._seen:
                continue
            self._seen = (piece.at, piece.choice)
            self._tokens += len(piece.tokens)
            while self._waiting and self._waiting[0].tokens < self._tokens:
                yield self._waiting.popleft()
            yield piece

    def rest(self) -> Iterator[Applied]:
        while self._waiting:
            yield self._waiting.popleft()


def own_job(request: str, subscription: Subscription | None = None) -> SourceLookup:
    """Return the look-up of the source of a request that is its own generate job."""

    async def source() -> AnswerSource:
        return AnswerSource(request, subscription)

    return source


class AnswerSources:
    """Finds the source and the response options of any generation, whichever router accepted the request."""

    def __init__(self, bus: Bus, notifications: Notifications, cards: Cards) -> None:
        self._bus, self._notifications, self._cards = bus, notifications, cards

    def of(self, request: str) -> SourceLookup:
        """Return the look-up of a known request's source; for a grounded request the look-up waits for progress."""
        if not request.startswith(_SEVERAL_JOBS):
            return own_job(request)

        async def source() -> AnswerSource:
            state = await self._bus.jobs.get(request)
            if state is None:
                raise NotFound("the request's result has expired", code="request_not_found")
            progress = await await_grounded_progress(
                self._notifications, request, state.deadline_ms + 1000
            )
            if isinstance(progress, Event):
                raise error_of(progress)
            return await self.generating(progress)

        return source

    async def generating(self, progress: GroundedProgress) -> AnswerSource:
        """Return the source of a grounded answer whose job is known; this router is notified of the job's events."""
        await self._bus.jobs.adopt(progress.job, self._notifications.router)
        return AnswerSource(progress.job, None, RetrievalHistory(progress.retrieval))

    def pieces(self, source: AnswerSource, deadline_ms: int) -> AsyncGenerator[AnswerEvent, None]:
        """Yield a source's pieces and extensions, and its outcome; see `follow`."""
        return follow(self._notifications, source.job, deadline_ms, source.subscription)

    async def options(self, request: str) -> ResponseOptions | None:
        """Return the response options of a generation; None if the request is no generation."""
        kept = await self._bus.jobs.view(request)
        if kept is not None:
            options = decode_options(kept)
            return options if options.kind in {"chat", "completion", "response"} else None
        state = await self._bus.jobs.get(request)
        if state is None or not request.startswith("chat."):
            return None if state is None else await grounded_options(self._bus, request)
        cards = (await self._cards.cards()).values()
        family = request.split("~", maxsplit=1)[0]
        model = next((card.name for card in cards if card.family == family), family)
        return ResponseOptions(kind="chat", model=model, choices=state.items, stream=True)
