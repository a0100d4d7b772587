"""The server of searches that routers send straight to this process, past Redis: reads, so a router may repeat them.

A call holds an encoded SearchWork. Calls that arrive together run as one batch; a batch that is predicted to be short
runs on the event loop, since handing it to a thread would take longer than the search.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from opentelemetry.trace import Span

from common import log, tracing
from common.clock import Clock
from common.errors import ConfigError, DeadlineExceeded, InvalidRequest, SpillwayError, Unavailable
from common.tasks import cancel, in_pool
from common.transport.call_server import Call, CallServer
from common.transport.own_address import own_address
from common.wire.jobs import decode_work
from common.wire.message import BadMessage, encode
from common.wire.results import Result, error_event
from common.wire.search import CopyWork, DocumentsWork, SearchWork
from services.vector_search.query_batch import QueryQueue, alike, opened, run
from services.vector_search.shard_copies import ShardCopies
from services.vector_search.shard_handle import ShardHandle
from services.vector_search.shard_manager import ShardManager

MOST_QUERIES = 4096  # queries that wait or run; routers send further ones through the lanes
QUICK_S = 0.001  # a batch predicted to take less runs on the event loop
_WEIGHT = 0.1  # weight of the newest batch in the mean seconds of a query
_MOST_KINDS = 64  # kinds of queries a shard keeps, as many as filters with cached documents
_log = log.get("vector_search")


class Read(NamedTuple):
    """A call with its decoded work, its shard, and its span in the caller's trace."""

    call: Call
    work: SearchWork | DocumentsWork
    handle: ShardHandle
    items: int
    span: Span
    arrived_s: float

    @property
    def key(self) -> bytes | None:
        """The key that calls of one batch share; computed only when several calls wait."""
        return alike(self.work)

    def reply(self, outcome: Result | SpillwayError, *, alone: bool = False) -> None:
        """Answer with a result or an error; `alone` if no other answer is sent with this one."""
        error = outcome if isinstance(outcome, SpillwayError) else None
        if not isinstance(outcome, SpillwayError):
            try:
                self.call.reply(encode(outcome), alone=alone)
            except ValueError:  # too large for a message: the lanes' error says how to ask for less
                error = Unavailable("the result is too large for a call")
        if error is not None:
            _fail(self.call, error)
            tracing.fail(self.span, error.code)
        self.span.end()


class ReadServer:
    """Answers calls of routers from the open shards of this process; computing of any length runs on `pool`."""

    def __init__(
        self, shards: ShardManager, pool: Executor, clock: Clock, copies: ShardCopies
    ) -> None:
        self._shards, self._pool, self._clock = shards, pool, clock
        self._copies = copies
        self._queue = QueryQueue[Read]()
        self._server = CallServer(self._take)
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = 0
        self._due = False  # whether `_start` has been scheduled
        self._draining = False
        self._query_s = WeakKeyDictionary[ShardHandle, OrderedDict[bytes, float]]()
        self.address = ""  # host:port, once it listens

    @property
    def token(self) -> str:
        """The secret that a caller must send in its hello."""
        return self._server.token

    async def start(self, host: str, port: int) -> None:
        """Listen; ConfigError if the address cannot be used. A wildcard is published as this machine's own address."""
        try:
            found, chosen = await self._server.start(host, port)
            if ipaddress.ip_address(found).is_unspecified:
                found = own_address()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"SPILLWAY_READS_HOST is {host!r}, SPILLWAY_READS_PORT is {port}: {error}; expected an address of "
                "this machine and a free port, or the host none"
            ) from error
        self.address = f"{found}:{chosen}"

    async def drain(self, drain_s: float) -> None:
        """Refuse new calls, end those that run within `drain_s`, and close every connection."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s)
        await cancel(*self._tasks)
        await self._server.close()

    # -- calls

    def _take(self, call: Call) -> None:
        try:
            if self._draining or self._held >= MOST_QUERIES:
                raise Unavailable("this process takes no more calls now")
            work = _decoded(call)
        except SpillwayError as error:
            _fail(call, error)
            return
        if isinstance(work, CopyWork):
            self._spawn(self._copy(call, work))
            return
        handle = self._shards.handles.get((work.collection, work.shard))
        if handle is None or work.after is not None:
            self._spawn(self._prepare(call, work))
        else:
            self._add(call, work, handle)

    async def _copy(self, call: Call, work: CopyWork) -> None:
        """Answer a process that copies a shard."""
        try:
            call.reply(encode(await self._copies.answer(work)))
        except SpillwayError as error:
            _fail(call, error)
        except Exception as error:  # noqa: BLE001 - the caller hears of it, and no other is touched
            _log.exception("copy_failed", collection=work.collection, shard=work.shard)
            _fail(call, Unavailable(f"the copy failed: {type(error).__name__}"))

    async def _prepare(self, call: Call, work: SearchWork | DocumentsWork) -> None:
        """Queue a call once its shard is open and has applied the write that the work names in `after`."""
        left_s = call.deadline - asyncio.get_running_loop().time()
        try:
            handle = await opened(self._shards, work, left_s)
        except SpillwayError as error:
            _fail(call, error)
        except Exception as error:  # noqa: BLE001 - the caller hears of it, and no other is touched
            _log.exception("shard_not_found", collection=work.collection, shard=work.shard)
            why = f"the collection could not be looked up: {type(error).__name__}"
            _fail(call, Unavailable(why, code="search_failed"))
        else:
            self._add(call, work, handle)

    def _add(self, call: Call, work: SearchWork | DocumentsWork, handle: ShardHandle) -> None:
        items = 1
        if isinstance(work, SearchWork) and handle.shard is not None:
            items = max(1, work.queries(handle.shard.record.dimension))
        self._held += items
        span: Span = tracing.NONE
        if tracing.on():
            told = {"spillway.queries": items, "spillway.shard": work.shard}
            trace = tracing.remote(work.trace if isinstance(work, SearchWork) else "")
            span = tracing.start("search", "server", trace, attributes=told)
        arrived_s = self._clock.perf_s()
        self._queue.add(Read(call, work, handle, items, span, arrived_s))
        if not self._due:  # calls of one turn of the event loop share a batch
            self._due = True
            asyncio.get_running_loop().call_soon(self._start)

    # -- batches

    def _start(self) -> None:
        self._due = False
        while batch := self._queue.take():
            batch = self._in_time(batch)
            if not batch:
                continue
            if self._predicted_s(batch) <= QUICK_S:
                self._end(batch, *self._executed(batch))
            else:
                self._spawn(self._run(batch))

    def _in_time(self, batch: list[Read]) -> list[Read]:
        """Refuse calls whose deadline has passed; return the others."""
        now = asyncio.get_running_loop().time()
        late = [read for read in batch if read.call.deadline <= now]
        if not late:
            return batch
        kept = [read for read in batch if read.call.deadline > now]
        if not kept:
            self._queue.done(batch)
        for read in late:
            self._held -= read.items
            read.reply(DeadlineExceeded("the deadline passed in the queue"))
        return kept

    def _predicted_s(self, batch: Sequence[Read]) -> float:
        """Return the predicted seconds of a batch; 1.0 for a kind of search without an earlier one."""
        kind, known = _kind(batch[0].work), self._query_s.get(batch[0].handle)
        if kind is None or known is None or kind not in known:
            return 1.0
        return known[kind] * sum(read.items for read in batch)

    async def _run(self, batch: list[Read]) -> None:
        try:
            outcomes, took_s = await in_pool(self._pool, self._executed, batch)
        except BaseException:
            self._queue.done(batch)
            self._held -= sum(read.items for read in batch)
            raise
        self._end(batch, outcomes, took_s)
        self._start()

    def _executed(self, batch: Sequence[Read]) -> tuple[list[Result | SpillwayError], float]:
        """Return a batch's outcomes and the seconds of computing, without the time to hand the batch to a thread."""
        began_s = self._clock.perf_s()
        outcomes = run(batch, self._clock)
        return outcomes, self._clock.perf_s() - began_s

    def _end(
        self, batch: Sequence[Read], outcomes: Sequence[Result | SpillwayError], took_s: float
    ) -> None:
        handle = batch[0].handle
        self._queue.done(batch)
        items = sum(read.items for read in batch)
        self._held -= items
        if (kind := _kind(batch[0].work)) is not None:
            known = self._query_s.setdefault(handle, OrderedDict())
            mean_s = known.pop(kind, took_s / items)
            known[kind] = mean_s + _WEIGHT * (took_s / items - mean_s)
            if len(known) > _MOST_KINDS:
                known.popitem(last=False)
        for read, outcome in zip(batch, outcomes, strict=True):
            read.reply(outcome, alone=len(batch) == 1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("read_failed", exc_info=error)


def _decoded(call: Call) -> SearchWork | DocumentsWork | CopyWork:
    try:
        work = decode_work(call.payload)
    except BadMessage as error:
        raise InvalidRequest(str(error)) from error
    if not isinstance(work, SearchWork | DocumentsWork | CopyWork):
        raise InvalidRequest(f"{type(work).__name__} in a call; expected a search")
    return work


def _kind(work: SearchWork | DocumentsWork) -> bytes | None:
    """Return the key of searches that take alike long, which is their filter; None if their time cannot be predicted.

    The first search with a filter looks up the matching documents; later searches find these in memory.
    """
    if isinstance(work, DocumentsWork) or work.mode != "vector":
        return None
    if work.asked_effort or work.budget_ms or work.depth:
        return None
    return msgspec.msgpack.encode(work.filter) if work.filter else b""


def _fail(call: Call, error: SpillwayError) -> None:
    call.fail(encode(error_event(0, "error", error)))
