"""POST /v1/responses, and GET and DELETE of a response, in the shape of OpenAI's Responses API; texts only.

A response that is stored is a turn of a session. A response that continues the last turn is appended to that turn's
session. A response that continues an earlier turn, a turn of another model, or a turn that another response continues,
gets a new session with copies of the turns before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from aiohttp import web

from common.bus import Bus
from common.errors import Conflict, InvalidRequest, NotFound, SpillwayError
from common.ids import family_of, job_id, ulid
from common.registry.sessions import SessionEnds, Sessions
from common.wire.sessions import SessionRecord, Turn
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import RequestContext
from services.router.cards import Cards
from services.router.http.generations import Generations
from services.router.http.receiver import TENANT, Receiver
from services.router.http.replies import reply, reply_json
from services.router.http.sessions import SessionsApi
from services.router.responses.model_response import ModelResponse, marks_in, session_of_response
from services.router.text import responses
from services.router.text.pool import INLINE_BYTES, TextPool
from services.router.text.responses import EarlierTurn, ResponseContext, ResponseRequest

_MOVED = frozenset({"session_busy", "session_changed", "session_deleted"})
_METADATA = b'{"api":"responses"}'


class StoredResponse(NamedTuple):
    """A response that a session keeps: the session, and its turns up to the response's; `last` if no turn follows."""

    record: SessionRecord
    turns: Sequence[Turn]
    last: bool

    def earlier(self) -> list[EarlierTurn]:
        """Return the conversation up to this response, without instructions."""
        return [
            EarlierTurn(
                unique=turn.job.rsplit("~", 1)[-1],
                messages=turn.shown or turn.messages,
                answer=turn.answer,
                marks=marks_in(turn.asked),
            )
            for turn in self.turns
        ]


class ResponsesApi:
    """Answers in the shape of the Responses API by one generate job each, and keeps responses in sessions."""

    def __init__(
        self,
        receiver: Receiver,
        cards: Cards,
        pool: TextPool,
        bus: Bus,
        generations: Generations,
        sessions_api: SessionsApi,
        ttl_s: int,
    ) -> None:
        self._receiver, self._cards, self._pool = receiver, cards, pool
        self._bus, self._sessions, self._ends = bus, Sessions(bus), SessionEnds(bus)
        self._generations, self._sessions_api, self._ttl_s = generations, sessions_api, ttl_s
        self._nth = itertools.count(1)  # each request takes the next partition

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/responses", self.create),
            web.get("/v1/responses/{id}", self.get),
            web.delete("/v1/responses/{id}", self.delete),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer an input; a known idempotency key attaches to its request."""
        raw = await self._receiver.body(request)
        caller = self._receiver.generation_context(request, raw)
        known = await self._generations.attached(request, caller)
        if known is not None:
            return known
        previous = responses.peek(raw).previous_response_id
        before = await self._before(previous, caller.tenant) if previous else None
        specs, default = await self._cards.specs(), await self._cards.generate_default()
        name = before.record.model if before else None
        named = partial(responses.model_of, raw, specs, default, name)
        model = await self._pool.run(named, inline=len(raw) < INLINE_BYTES)
        if before is not None and before.last and before.record.model == model:
            try:
                return await self._answered(request, caller, raw, before, before.record)
            except Conflict as error:
                if error.code not in _MOVED:  # another response is the next turn
                    raise
        record = await self._new_session(request, caller, model, before)
        return await self._answered(request, caller, raw, before, record, fresh=True)

    async def get(self, request: web.Request) -> web.Response:
        """Return a stored response; NotFound `response_not_found` for any other."""
        found = await self._stored(request)
        turn, record = found.turns[-1], found.record
        options = ResponseOptions(
            kind="response",
            model=record.model,
            session=record.id,
            asked=turn.asked,
            marks=marks_in(turn.asked),
        )
        return reply(ModelResponse(turn.job, options).kept(turn))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a stored response: its turn, or its session if that keeps no other response.

        Turns that were copied from another session do not count as responses: their originals stay.
        """
        caller = self._receiver.context(request)
        found = await self._stored(request)
        session, job = found.record.id, found.turns[-1].job
        running = await self._sessions.running_turn(found.record)
        ran = await self._sessions.jobs(session)
        turns = await self._sessions.turns(session)
        others = any(turn.job in ran and turn.job != job for turn in turns)
        others |= running is not None  # the deletion is refused then
        await self._sessions_api.erase(request, caller, session, job if others else "")
        gone = {"id": request.match_info["id"], "object": "response", "deleted": True}
        return reply_json(gone)

    async def _stored(self, request: web.Request) -> StoredResponse:
        """Return the stored response that a path names; NotFound `response_not_found` if there is none."""
        name = request.match_info["id"]
        found = await self._found(name, request[TENANT])
        if found is None:
            raise NotFound(
                f"no response {name[:160]!r}: it is unknown, was not stored, or has expired",
                code="response_not_found",
            )
        return found

    async def _found(self, name: str, tenant: str) -> StoredResponse | None:
        session, unique = session_of_response(name)
        try:
            record = await self._sessions.get(session) if session else None
        except ValueError:
            record = None
        if record is None or record.tenant != tenant:
            return None
        turns = await self._sessions.turns(record.id)
        for at, turn in enumerate(turns):
            if turn.job.endswith(f"~{unique}"):
                return StoredResponse(record, turns[: at + 1], at + 1 == len(turns))
        return None

    async def _before(self, previous: str, tenant: str) -> StoredResponse:
        """Return the response to continue; InvalidRequest `previous_response_not_found`, in OpenAI's words."""
        found = await self._found(previous[:400], tenant)
        if found is None:
            raise InvalidRequest(
                f"Previous response with id {previous[:160]!r} not found: it is unknown, was not stored, or has "
                "expired",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return found

    async def _new_session(
        self,
        request: web.Request,
        caller: RequestContext,
        model: str,
        before: StoredResponse | None,
    ) -> SessionRecord:
        """Return the record, not yet stored, of a new session for a response, with the turns before it."""
        card = await self._cards.card(model)
        family = await self._cards.family(model, request.remote or "", next(self._nth))
        now, turns = self._bus.clock.now_ms(), before.turns if before else ()
        last = turns[-1] if turns else None
        kept = last is not None and before is not None and before.record.fingerprint
        return SessionRecord(
            id=job_id(family, ulid(now)),
            tenant=caller.tenant,
            model=model,
            fingerprint=card.fingerprint if kept in (None, False, card.fingerprint) else "",
            version=len(turns),
            tokens=last.history + len(last.prompt) + len(last.output) if last else 0,
            turns=len(turns),
            ttl_s=before.record.ttl_s if before else self._ttl_s,
            created_ms=now,
            updated_ms=now,
            metadata=_METADATA,
        )

    async def _answered(
        self,
        request: web.Request,
        caller: RequestContext,
        raw: bytes,
        before: StoredResponse | None,
        record: SessionRecord,
        *,
        fresh: bool = False,
    ) -> web.StreamResponse:
        """Answer as the next turn of a session; a `fresh` session is stored first if the response is to be kept."""
        specs, default = await self._cards.specs(), await self._cards.generate_default()
        said = before.earlier() if before else []
        model = before.record.model if before else None
        context = ResponseContext(said, model, record.id, record.version, record.ttl_s)
        call = partial(
            responses.response, raw, specs, default, caller.tenant, context, low=caller.low
        )
        ask: ResponseRequest = await self._pool.run(call)
        spec = self._generations.spec(family_of(record.id), ask.made, ask.options)
        if fresh and ask.stored:
            await self._sessions.create(record, before.turns if before else ())
        try:
            accepted = await self._generations.accept(request, caller, spec)
        except SpillwayError as error:
            if fresh and ask.stored and error.code != "bus_down":
                await self._ends.forget(record.id, caller.tenant)  # the session has no turn
            raise
        return await self._generations.deliver(request, caller, spec, accepted)
