"""Searches that the router sends straight to a vector_search process, past Redis.

A search changes nothing, so it needs no job: if a process dies, only the answer is lost, and another process, or a
lane, is asked instead. The processes and their addresses are read from the workers' records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import cast

from msgspec.structs import replace

from common import log, tracing
from common.bus import Bus
from common.cost.online import Lateness
from common.errors import DeadlineExceeded
from common.ids import Family
from common.transport.call_client import CallClient, CallFailed, CallLost
from common.wire.message import BadMessage, decode, encode
from common.wire.registry import WorkerRecord
from common.wire.results import Event, decode_result
from common.wire.search import MissingShard, SearchResult, SearchWork
from services.router.responses.outcomes import error_of

CONNECT_S = 2.0
_AGAIN_S = 5.0  # between two tries to reach a process; a restarted one has another token
_HEDGE = 3.0  # a second process is asked after this many times the 99th percentile
_LEAST_HEDGE_S, _MOST_HEDGE_S = 0.02, 1.0  # bounds of it: measured searches include hedged ones
_log = log.get("router")


class ShardReads:
    """Asks vector_search processes directly; `search` returns None where the lanes must be used instead."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._clients: dict[str, CallClient] = {}  # by the process' token
        self._opening: dict[str, float] = {}  # by token, the time of the last try to connect
        self._took = Lateness(0.99, window=1000, prior=_LEAST_HEDGE_S / _HEDGE)

    async def ready(self, family: Family, items: int) -> bool:
        """Return whether a process can take `items` queries now; begin to connect to processes without a connection."""
        return bool(await self._processes(family, items))

    async def search(
        self,
        family: Family,
        works: Sequence[SearchWork],
        items: int,
        deadline_ms: int,
        holders: Sequence[Collection[str] | None],
    ) -> list[SearchResult | MissingShard] | None:
        """Return the results of one request's works, each of `items` queries; None if no process could give any.

        `holders` are the replicas that serve each work's shard (None: all do). If no process could answer for a shard,
        a MissingShard takes the place of its result. Raises an error that every process would give (4xx, 504).
        """
        clients = await self._processes(family, items)
        left = [[c for name, c in clients if held is None or name in held] for held in holders]
        asks: list[_Ask] = []
        if not any(left):
            return None
        clock = self._bus.clock
        began_s = clock.monotonic()
        try:
            with tracing.span("search", "client"):
                trace = tracing.traceparent(tracing.current())
                asks = [
                    _Ask(work.shard, encode(replace(work, trace=trace) if trace else work), chosen)
                    for work, chosen in zip(works, left, strict=True)
                ]
                await self._asked(asks, deadline_ms)
        finally:
            for ask in asks:
                ask.leave()
        if not any(ask.result for ask in asks):
            return None
        if all(ask.result for ask in asks):
            self._took.add(clock.monotonic() - began_s)
        return [ask.result or MissingShard(ask.shard, ask.why) for ask in asks]

    def only(self, family: Family, items: int, held: Collection[str] | None) -> CallClient | None:
        """Return the connection to the only process that serves a shard and has room for `items` queries.

        None if that is unknown without asking Redis, or if there are several such processes, one of which may be late.
        """
        records = self._bus.workers.recent(family)
        if records is None:
            return None
        found = self._usable(records.values(), items)
        fit = [client for name, client in found if held is None or name in held]
        return fit[0] if len(fit) == 1 else None

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()

    # -- processes

    async def _processes(self, family: Family, items: int) -> list[tuple[str, CallClient]]:
        """Return connections to the processes that have room for `items` queries, the least used first."""
        records = await self._bus.workers.records(family)
        found = self._usable(records.values(), items)
        return sorted(found, key=_in_flight) if len(found) > 1 else found

    def _usable(self, records: Iterable[WorkerRecord], items: int) -> list[tuple[str, CallClient]]:
        found: list[tuple[str, CallClient]] = []
        for record in records:
            if not record.address or record.draining:
                continue
            client = self._clients.get(record.token)
            if client is None or not client.usable:
                self._reach(record)
            elif client.in_flight + items <= record.depth_items:
                found.append((record.replica, client))
        return found

    def _reach(self, record: WorkerRecord) -> None:
        """Begin to connect to a process in the background, unless a try began less than _AGAIN_S ago."""
        now = self._bus.clock.monotonic()
        if now - self._opening.get(record.token, -_AGAIN_S) < _AGAIN_S:
            return
        self._opening[record.token] = now
        self._bus.supervisor.spawn(self._open(record), "reach a vector_search process")

    async def _open(self, record: WorkerRecord) -> None:
        host, _, port = record.address.rpartition(":")
        try:
            client = await CallClient.open(host, int(port), record.token, CONNECT_S)
        except (OSError, ValueError) as error:
            _log.info("search_process_not_reached", worker=record.worker, why=str(error))
            return
        self._clients = {token: known for token, known in self._clients.items() if known.usable} | {
            record.token: client
        }
        self._opening = {token: at for token, at in self._opening.items() if token in self._clients}

    # -- calls

    async def _asked(self, asks: Sequence[_Ask], deadline_ms: int) -> None:
        """Ask the first process for each shard, and the next if a process fails or is late, until all shards are over.

        Calls to one process go out in one round. The usual case, one shard on one process, needs no task and no
        hedging. A call ends by itself at the deadline.
        """
        for ask in asks:
            ask.send(self._left_ms(deadline_ms))
        if len(asks) == 1 and not asks[0].left and len(asks[0].sent) == 1:
            answer = next(iter(asks[0].sent))
            with contextlib.suppress(CallFailed, CallLost, TimeoutError):
                await answer
            asks[0].take(answer)
            return
        while waiting := {answer: ask for ask in asks if not ask.over for answer in ask.sent}:
            may_hedge = any(ask.left for ask in waiting.values())
            late_s = min(max(_LEAST_HEDGE_S, _HEDGE * self._took.value), _MOST_HEDGE_S)
            done, _ = await asyncio.wait(
                waiting, timeout=late_s if may_hedge else None, return_when=asyncio.FIRST_COMPLETED
            )
            for answer in done:
                waiting[answer].take(answer)
            for ask in asks:
                if not ask.over and (not ask.sent or not done):
                    ask.send(self._left_ms(deadline_ms))

    def _left_ms(self, deadline_ms: int) -> int:
        return deadline_ms - self._bus.clock.now_ms()


class _Ask:
    """One shard's part of a search: the processes left to ask, and the calls without an answer."""

    def __init__(self, shard: int, payload: bytes, clients: Sequence[CallClient]) -> None:
        self.shard, self.left = shard, list(clients)
        self.sent: set[asyncio.Future[bytes]] = set()
        self.result: SearchResult | None = None
        self.why = "no process that serves it can be reached"
        self._payload = payload

    @property
    def over(self) -> bool:
        """Whether there is a result, or no call to wait for and no process left to ask."""
        return self.result is not None or not (self.sent or self.left)

    def send(self, left_ms: int) -> None:
        """Call the next process whose connection is open, if there is one."""
        while self.left:
            try:
                self.sent.add(self.left.pop(0).call(self._payload, left_ms))
            except CallLost as error:
                self.why = str(error)
            else:
                return

    def take(self, answer: asyncio.Future[bytes]) -> None:
        """Take a process' answer; raise an error that every other process would give, too."""
        self.sent.discard(answer)
        if self.result is not None:
            return
        found = taken(answer)
        if isinstance(found, SearchResult):
            self.result = found
        else:
            self.why = found

    def leave(self) -> None:
        """Cancel the calls that have no answer."""
        for answer in self.sent:
            answer.cancel()


def taken(answer: asyncio.Future[bytes]) -> SearchResult | str:
    """Return the result in a process' answer, or why there is none; raise an error that all processes would give."""
    try:
        return cast("SearchResult", decode_result(answer.result()))
    except CallFailed as failed:
        error = error_of(decode(failed.payload, Event))
        if error.http_status < 500 or isinstance(error, DeadlineExceeded):
            raise error from None
        return error.message
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the result") from None
    except (CallLost, BadMessage) as error:
        return str(error)


def _in_flight(process: tuple[str, CallClient]) -> int:
    return process[1].in_flight
