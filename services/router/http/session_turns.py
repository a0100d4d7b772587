"""Turns of a session: the history that a new turn continues, and the wait for the turn lock."""

from __future__ import annotations

from typing import Any

import msgspec

from common.bus import Bus, Notifications
from common.errors import Conflict, NotFound
from common.registry.sessions import Sessions
from services.router.admission.job_spec import RequestContext
from services.router.cards import Cards
from services.router.text.chats import SessionHistory
from services.router.workflows.session_history import session_history

# The tries of a turn that does not wait, while its session keeps changing.
_TRIES = 3
_LOOK_MS = 5000
_EARLIER_TURNS = 4


class SessionTurns:
    """Reads sessions for their next turns."""

    def __init__(self, bus: Bus, notifications: Notifications, cards: Cards) -> None:
        self._clock, self._sessions = bus.clock, Sessions(bus)
        self._notifications, self._cards = notifications, cards

    async def history(self, session: str, tenant: str) -> SessionHistory:
        """Return a session's history; NotFound `session_not_found` if the tenant has no such session."""
        try:
            record = await self._sessions.get(session)
        except ValueError:
            record = None
        if record is None or record.tenant != tenant:
            raise NotFound(
                f"no session {session[:120]!r}", code="session_not_found", param="session"
            )
        turns = await self._sessions.turns(session)
        spec = (await self._cards.specs()).get(record.model)
        return session_history(record, turns, spec.fingerprint if spec is not None else None)

    async def earlier(self, session: str) -> list[dict[str, Any]]:
        """Return the messages of the last turns as the client sent them; the session's owner is checked elsewhere."""
        found: list[dict[str, Any]] = []
        for turn in await self._sessions.turns(session, -_EARLIER_TURNS):
            found += msgspec.json.decode(turn.shown or turn.messages, type=list[dict[str, Any]])
            found.append({"role": "assistant", "content": turn.answer})
        return found

    async def retry(
        self, caller: RequestContext, session: str, error: Conflict, *, wait: bool, tries: int
    ) -> None:
        """Wait until a refused turn may be tried again, or raise its error.

        If the session changed, a turn has _TRIES tries, or any number with `wait`; if the session is busy, only with
        `wait`.
        """
        if error.code == "session_changed" and (wait or tries < _TRIES):
            return
        if error.code != "session_busy" or not wait:
            raise error
        record = await self._sessions.get(session)
        if record is not None and record.busy:
            until_ms = min(caller.deadline_ms, self._clock.now_ms() + _LOOK_MS)
            await self._notifications.end(record.busy, until_ms)
