"""Quick searches: requests that go from a client's connection to the searching process without a task or a route.

A client that searches repeatedly sends the same head each time, except for the length of the body. Since aiohttp has
parsed such a head before, the search after it is sent to its process as soon as its bytes arrive, and the hits are sent
back as soon as they arrive. Only searches by vectors in a single shard, which one process serves, are answered so; all
others, and those that fail, are handled by aiohttp, which is safe since a search changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web
from multidict import CIMultiDictProxy

from common import log, tracing
from common.bus.writes import Writes
from common.clock import Clock
from common.errors import DeadlineExceeded, SpillwayError
from common.ids import Family, job_id, ulid
from common.registry.layout import ShardLayout
from common.transport.call_client import CallLost
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import SearchResult, SearchWork
from common.wire.workflows import ResponseOptions, SearchRequest
from services.router.admission.controller import AdmissionController
from services.router.http.middleware import AccessGuard, RequestObserver, bearer
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.receiver import Receiver
from services.router.http.replies import error_response
from services.router.http.whole_reply import WholeReply, one_piece
from services.router.layouts import Layouts
from services.router.recent_collections import RecentCollections
from services.router.responses import json_bodies
from services.router.shard_reads import ShardReads, taken
from services.router.text import collections
from services.router.text.pool import INLINE_TEXT_BYTES
from services.router.workflows.search import QUERIES_AT_ONCE, search_work

ROUTE = "/v1/collections/{name}/search"
# Whether a request's search is plain (`is_plain`), so that a repetition may be answered without aiohttp.
PLAIN = web.RequestKey("plain_search", bool)
_MOST_HEADS = 1024
_MOST_HEAD_BYTES = 4096
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})(?=\r\n)", re.IGNORECASE)
_INLINE_NUMBERS = 2048
_INLINE_BYTES = 1 << 20
# Headers of requests that are traced, are kept for later, come from a page whose browser expects CORS headers, or have
# a body that differs from the bytes after the head.
_OTHER_WAYS = (
    "traceparent",
    "Idempotency-Key",
    "Spillway-Resume",
    "Origin",
    "Expect",
    "Upgrade",
    "Content-Encoding",
    "Transfer-Encoding",
)
Answered = Callable[[bytes | None], None]
_log = log.get("router")


class KnownHead(NamedTuple):
    """The collection's name and the headers that aiohttp read in a head; the length of the body may differ."""

    name: str
    headers: CIMultiDictProxy[str]


class _Asked(NamedTuple):
    """A search that was sent to its process, and the function that gets its reply."""

    family: Family
    record: CollectionRecord
    layout: ShardLayout
    many: bool
    began_s: float
    answered: Answered


class QuickSearches:
    """Answers searches with known heads; one per router."""

    def __init__(
        self,
        receiver: Receiver,
        recent: RecentCollections,
        limits: ParcelLimits,
        admission: AdmissionController,
        guard: AccessGuard,
        observer: RequestObserver,
        writes: Writes,
        reads: ShardReads,
        layouts: Layouts,
        clock: Clock,
    ) -> None:
        self._receiver, self._recent, self._limits = receiver, recent, limits
        self._admission, self._guard, self._observer = admission, guard, observer
        self._writes, self._reads, self._layouts = writes, reads, layouts
        self._clock = clock
        self._heads: dict[bytes, KnownHead] = {}

    def learn(self, head: bytes, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Remember a head if its request was a plain search whose reply was sent whole on a kept connection.

        Heads of other requests, such as searches by text, are left out, since their bodies would be read twice.
        """
        if not isinstance(request, web.Request) or not isinstance(response, WholeReply):
            return
        plain = request.get(PLAIN) and not any(name in request.headers for name in _OTHER_WAYS)
        length = _LENGTH.search(head)
        if plain and length is not None and response.sent_whole and len(head) <= _MOST_HEAD_BYTES:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            known = KnownHead(request.match_info["name"], request.headers)
            self._heads[_without(length, head)] = known

    def begin(self, data: bytes, answered: Answered) -> asyncio.Future[bytes] | None:
        """Send a search whose bytes are all of `data` to its process; None if aiohttp must handle the request.

        `answered` gets the bytes of the reply, or None if aiohttp must handle the request after all. Cancelling the
        returned future abandons the search, and `answered` is not called.
        """
        end = data.find(_END) + len(_END)
        length = _LENGTH.search(data, 0, end) if self._heads else None
        if length is None or len(data) - end != int(length[1]):
            return None
        head = self._heads.get(_without(length, data[:end]))
        if head is None or tracing.on() or self._admission.draining:
            return None
        try:
            return self._sent(head, data[end:], answered)
        except (SpillwayError, CallLost, ValueError):  # aiohttp's handler reports it
            return None
        except Exception:  # noqa: BLE001 - a bug must not end the connection: the other way may be without it
            _log.exception("quick_search_failed")
            return None

    def _sent(
        self, head: KnownHead, raw: bytes, answered: Answered
    ) -> asyncio.Future[bytes] | None:
        """Send a search to its process, or return None if aiohttp must handle it; raise its faults."""
        began_s = self._clock.perf_s()
        caller = self._guard.known(bearer(head.headers))
        record = caller and self._recent.known(caller.tenant, head.name)
        layout = record and self._layouts.known(record)
        if not (caller and record and layout) or len(layout.numbers) != 1:
            return None
        counted = caller.key is not None and caller.key.counts_requests
        if counted or not self._receiver.takes(raw) or not read_at_once(raw):
            return None
        family = self._writes.search_family(record.id)
        many, items, work = self._work(record, layout, raw)
        process = self._reads.only(family, items, layout.holders()[0])
        if process is None:
            return None
        left_ms = self._receiver.timeout_ms(head.headers, caller.key)
        answer = process.call(encode(work), left_ms)
        asked = _Asked(family, record, layout, many, began_s, answered)
        self._observer.begin()
        answer.add_done_callback(lambda done: self._end(asked, done))
        return answer

    def _work(
        self, record: CollectionRecord, layout: ShardLayout, raw: bytes
    ) -> tuple[bool, int, SearchWork]:
        """Return whether a body has a list of searches, their number, and their work; ValueError for other kinds."""
        ask = collections.search(
            raw, record.dimension, record.metric, self._limits.of(), spec=None, prompt=""
        )
        if not is_plain(ask):
            raise ValueError("a search of another kind")
        work = search_work(record, ask, ask.vectors, ask.texts, layout, layout.numbers[0])
        return ask.many, ask.count, work

    def _end(self, asked: _Asked, answer: asyncio.Future[bytes]) -> None:
        """Reply to a search that its process has answered; count a cancelled search as left by its client (499)."""
        status, reply = 499, None
        if not answer.cancelled():
            try:
                status, reply = self._reply(asked, answer)
            except Exception:  # noqa: BLE001 - a bug must not leave the client without an answer
                _log.exception("quick_search_failed")
        if reply is not None or answer.cancelled():
            self._observer.end(ROUTE, asked.record.model or "", status, asked.began_s)
        else:
            self._observer.leave()
        if not answer.cancelled():
            asked.answered(reply)

    def _reply(self, asked: _Asked, answer: asyncio.Future[bytes]) -> tuple[int, bytes | None]:
        """Return the status and the bytes of the reply to an answer; None if aiohttp's handler may find another."""
        name = job_id(asked.family, ulid())  # in the form of a job's id, without a job
        try:
            found = taken(answer)
        except DeadlineExceeded as error:
            return error.http_status, _refusal(error, name)
        except SpillwayError:
            return 0, None
        if not isinstance(found, SearchResult):
            return 0, None
        self._admission.count_read(asked.family)
        return 200, _found(asked, name, found)


def _found(asked: _Asked, name: str, found: SearchResult) -> bytes:
    applied = asked.layout.token({asked.layout.numbers[0]: found.applied})
    options = ResponseOptions("search", asked.record.model or "", many=asked.many)
    body = json_bodies.search(options, name, found, applied)
    head = (("Content-Type", "application/json"), ("x-request-id", name))
    return one_piece(200, "OK", head, body)


def _refusal(error: SpillwayError, name: str) -> bytes:
    response = error_response(error)
    assert isinstance(response.body, bytes)
    head = (*response.headers.items(), ("x-request-id", name))
    return one_piece(response.status, response.reason, head, response.body)


def _without(length: re.Match[bytes], head: bytes) -> bytes:
    """Return a head without the digits of the body's length."""
    return head[: length.start(1)] + head[length.end(1) :]


def is_plain(ask: SearchRequest) -> bool:
    """Return whether a search is by vectors only, fits one job, has no time budget, and is not partial."""
    chosen = ask.mode != "vector" or ask.budget_ms is not None or ask.partial
    return not (ask.tokens or chosen or ask.count > QUERIES_AT_ONCE)


def read_at_once(raw: bytes) -> bool:
    """Return whether parsing a body here blocks the loop no longer than handing it to a text process would."""
    if len(raw) < 8 * INLINE_TEXT_BYTES:
        return True
    # Texts are tokenized, and the cost of numbers is their count; vectors in base64 have few commas. A body with
    # escapes may hide the name "text", so a text process parses it.
    numbers = raw.count(b",") > _INLINE_NUMBERS
    return not (numbers or len(raw) > _INLINE_BYTES or b'"text' in raw or b"\\" in raw)
