"""The session a chat turn continues: reading it as it stands, and waiting for its turn lock."""

from __future__ import annotations

from common.errors import Conflict, NotFound
from common.registry.sessions import Sessions
from services.router.admission.job_spec import RequestContext
from services.router.http.context import Router
from services.router.text.chats import SessionHistory
from services.router.workflows.session_history import past

# How often a session that changes under a turn that does not wait is read anew.
_TRIES = 3
_LOOK_MS = 5000


async def history(router: Router, session: str, tenant: str) -> SessionHistory:
    """Return a session as it stands; NotFound `session_not_found` if the tenant has none of that id."""
    try:
        record = await Sessions(router.bus).get(session)
    except ValueError:
        record = None
    if record is None or record.tenant != tenant:
        raise NotFound(f"no session {session[:120]!r}", code="session_not_found", param="session")
    turns = await Sessions(router.bus).turns(session)
    spec = (await router.cards.specs()).get(record.model)
    return past(record, turns, spec.fingerprint if spec is not None else None)


async def try_again(
    router: Router, caller: RequestContext, session: str, error: Conflict, *, wait: bool, tries: int
) -> None:
    """Return when a refused turn may be tried again; else raise its error.

    A session that changed is read anew a few times; one that is busy is waited for if the client asked for that.
    """
    if error.code == "session_changed" and (wait or tries < _TRIES):
        return
    if error.code != "session_busy" or not wait:
        raise error
    record = await Sessions(router.bus).get(session)
    if record is not None and record.busy:
        until_ms = min(caller.deadline_ms, router.clock.now_ms() + _LOOK_MS)
        await router.notifications.end(record.busy, until_ms)
