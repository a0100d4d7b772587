"""/v1/requests/{id or idempotency key}: the state and result of a request, and its cancellation, at any router."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from common import tracing
from common.bus import Bus
from common.errors import NotFound, SpillwayError
from common.wire.results import Event
from services.router.admission.request_runner import RequestRunner
from services.router.admission.request_store import RequestStore
from services.router.http.answers import AnswerWriter
from services.router.http.records import TenantRecords
from services.router.http.replies import reply, reply_json
from services.router.responses.answer_sources import AnswerSources
from services.router.responses.outcomes import error_of, result_of
from services.router.responses.results import ResultWriter


class RequestsApi:
    """Shows and cancels requests that any router accepted."""

    def __init__(
        self,
        records: TenantRecords,
        bus: Bus,
        runner: RequestRunner,
        store: RequestStore,
        sources: AnswerSources,
        answers: AnswerWriter,
        writer: ResultWriter,
    ) -> None:
        self._records, self._bus, self._runner, self._store = records, bus, runner, store
        self._sources, self._answers, self._writer = sources, answers, writer

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of a request's state and cancellation."""
        return [
            web.get("/v1/requests/{id}", self.get),
            web.delete("/v1/requests/{id}", self.cancel),
            web.post("/v1/requests/{id}/cancel", self.cancel),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """Return a request's state, and its result or error once it is over."""
        name = await self._records.request(request)
        await self._store.note_reader(name)
        state = await self._bus.jobs.get(name)
        if state is None:
            raise NotFound(f"no request {name!r}", code="request_not_found")
        body: dict[str, Any] = {
            "id": name,
            "object": "request",
            "state": state.state,
            "lane": state.lane,
            "created": state.created_ms // 1000,
            "deadline": state.deadline_ms / 1000,
            "attempts": state.attempts,
        }
        if state.traceparent:
            body["trace_id"] = tracing.trace_id(tracing.remote(state.traceparent))
        if state.replay_of:
            body["replay_of"] = state.replay_of
        events = await self._bus.jobs.log(name) if state.over else []
        if not events or not events[-1].ends:
            return reply_json(body)
        try:
            result = await self._result(name, events[-1])
        except SpillwayError as error:
            return reply_json(body | error.body())
        return reply(msgspec.json.encode(body)[:-1] + b',"result":' + result + b"}")

    async def _result(self, name: str, outcome: Event) -> bytes:
        """Return the JSON of a request's result, or raise its error."""
        if outcome.kind != "result":
            raise error_of(outcome)
        options = await self._sources.options(name)
        if options is not None:
            return await self._answers.whole(name, options)
        kept = await self._store.options(name)
        return await self._writer.json(name, result_of(outcome), kept)

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a request; a request that is over stays as it is."""
        name = await self._records.request(request)
        verdict = await self._runner.cancel(name)
        state = await self._bus.jobs.get(name)
        body = {
            "id": name,
            "object": "request",
            "state": state.state if state else "cancelled",
            "cancelled": verdict in {"removed", "flagged"},
        }
        return reply_json(body)
