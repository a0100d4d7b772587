"""Searches answered at once: between a client's connection and the process that searches there is no task and no route.

A client that searches again and again sends the same head each time, but for the length of the body. What aiohttp has
made of a head once holds for the same bytes, so the search behind it goes to its process as its bytes come, and its
hits go back as they come. That holds for searches by vectors of one shard that one process serves; all others, and all
that fail, go the way of every request, since a search changes nothing.
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
# Of a request: whether its search is one that may be answered past aiohttp (`is_plain`).
PLAIN = web.RequestKey("plain_search", bool)
_MOST_HEADS = 1024
_MOST_HEAD_BYTES = 4096
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,9})(?=\r\n)", re.IGNORECASE)
_INLINE_NUMBERS = 2048
_INLINE_BYTES = 1 << 20
# With these a request is traced, is kept for later, comes from a page whose browser wants headers of its own, or has a
# body that is not the bytes after its head.
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
    """What aiohttp has read in a head: the collection's name and the headers, whose body's length may differ."""

    name: str
    headers: CIMultiDictProxy[str]


class _Asked(NamedTuple):
    """A search that was sent to its process, and who waits for its reply."""

    family: Family
    record: CollectionRecord
    layout: ShardLayout
    many: bool
    began_s: float
    answered: Answered


class QuickSearches:
    """Answers the searches whose heads it has learned; one a router."""

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
        """Take note of a head if its request was a plain search that had its whole reply on a connection that is kept.

        A head of others, such as searches by text, would have their bodies read twice.
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
        """Send the search that these bytes are to its process; None if they must go the way of every request.

        `answered` gets the bytes of the reply, or None if the request must go that way after all. Cancelling what is
        returned leaves the search, and `answered` is not called.
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
        except (SpillwayError, CallLost, ValueError):  # the other way tells what is wrong
            return None
        except Exception:  # noqa: BLE001 - a bug must not end the connection: the other way may be without it
            _log.exception("quick_search_failed")
            return None

    def _sent(
        self, head: KnownHead, raw: bytes, answered: Answered
    ) -> asyncio.Future[bytes] | None:
        """Send a search to its process; raises what is wrong with it."""
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
        """Return whether a body lists searches, how many, and their work; ValueError for those of other kinds."""
        ask = collections.search(
            raw, record.dimension, record.metric, self._limits.of(), spec=None, prompt=""
        )
        if not is_plain(ask):
            raise ValueError("a search of another kind")
        work = search_work(record, ask, ask.vectors, ask.texts, layout, layout.numbers[0])
        return ask.many, ask.count, work

    def _end(self, asked: _Asked, answer: asyncio.Future[bytes]) -> None:
        """Reply to a search that its process has answered, or count it as left by its client."""
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
        """Return the status and the bytes of the reply to an answer; None where the other way may find another one."""
        name = job_id(asked.family, ulid())  # of a job's form, though there is none
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
    """Return a head without the digits of its body's length."""
    return head[: length.start(1)] + head[length.end(1) :]


def is_plain(ask: SearchRequest) -> bool:
    """Return whether a search is by vectors alone, of a few at once, and asks for nothing that takes a choice."""
    chosen = ask.mode != "vector" or ask.budget_ms is not None or ask.partial
    return not (ask.tokens or chosen or ask.count > QUERIES_AT_ONCE)


def read_at_once(raw: bytes) -> bool:
    """Return whether reading a body here holds the loop no longer than handing it to another process would."""
    if len(raw) < 8 * INLINE_TEXT_BYTES:
        return True
    # Texts are tokenized, and numbers cost by their count; vectors in base64 have few commas. A body with escapes may
    # hide the name "text", so another process reads it.
    numbers = raw.count(b",") > _INLINE_NUMBERS
    return not (numbers or len(raw) > _INLINE_BYTES or b'"text' in raw or b"\\" in raw)
