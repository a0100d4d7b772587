"""Searches that the router sends straight to a vector_search process, past Redis.

A search changes nothing, so it needs no job: a process that dies takes no more with it than the answer, and another
process, or a lane, is asked instead. The processes and their addresses are those of the workers' records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from common.wire.search import SearchResult, SearchWork
from services.router.responses.outcomes import error_of

CONNECT_S = 2.0
_AGAIN_S = 5.0  # between two tries to reach a process; one that starts again has another token
_HEDGE = 3.0  # times the 99th percentile: then a second process is asked
_LEAST_HEDGE_S = 0.02
_log = log.get("router")


class ShardReads:
    """Asks vector_search processes directly; `search` returns None where the lanes must be used instead."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._clients: dict[str, CallClient] = {}  # by the process' token
        self._opening: dict[str, float] = {}  # when it was last tried
        self._took = Lateness(0.99, window=1000, prior=_LEAST_HEDGE_S / _HEDGE)

    async def ready(self, family: Family, items: int) -> bool:
        """Return whether a process can be sent so many queries now; where not, one is being reached."""
        return bool(await self._processes(family, items))

    async def search(
        self, family: Family, works: Sequence[SearchWork], items: int, deadline_ms: int
    ) -> list[SearchResult] | None:
        """Return the results of one request's works, each of `items` queries; None if no process could give them.

        Raises the error of a request that no process could answer otherwise (4xx, 504).
        """
        clients = await self._processes(family, len(works) * items)
        if not clients:
            return None
        clock = self._bus.clock
        left_ms = deadline_ms - clock.now_ms()
        began_s = clock.monotonic()
        try:
            with tracing.span("search", "client"):
                trace = tracing.traceparent(tracing.current())
                payloads = [encode(replace(work, trace=trace)) for work in works]
                async with asyncio.timeout(left_ms / 1000):
                    found = await self._asked(clients, payloads, left_ms)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the result") from error
        if found is not None:
            self._took.add(clock.monotonic() - began_s)
        return found

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()

    # -- processes

    async def _processes(self, family: Family, items: int) -> list[CallClient]:
        """Return connections to the processes that have room for so many queries, the least used first."""
        found: list[CallClient] = []
        for record in (await self._bus.workers.records(family)).values():
            if not record.address or record.draining:
                continue
            client = self._clients.get(record.token)
            if client is None or not client.usable:
                self._reach(record)
            elif client.in_flight + items <= record.depth_items:
                found.append(client)
        return sorted(found, key=_in_flight) if len(found) > 1 else found

    def _reach(self, record: WorkerRecord) -> None:
        """Begin to connect to a process, unless that was tried a moment ago; nobody waits for it."""
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

    async def _asked(
        self, clients: Sequence[CallClient], payloads: Sequence[bytes], left_ms: int
    ) -> list[SearchResult] | None:
        """Ask the first process, and the next one if that fails or is late; None if none of them could answer."""
        if len(clients) == 1:  # the usual case needs no task
            try:
                return await _received(_send(clients[0], payloads, left_ms))
            except _Elsewhere:
                return None
        waiting: set[asyncio.Task[list[SearchResult]]] = set()
        left = list(clients)
        try:
            while left or waiting:
                if left:
                    answers = _send(left.pop(0), payloads, left_ms)
                    waiting.add(asyncio.create_task(_received(answers)))
                late_s = max(_LEAST_HEDGE_S, _HEDGE * self._took.value) if left else None
                done, waiting = await asyncio.wait(
                    waiting, timeout=late_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    error = task.exception()
                    if error is None:
                        return task.result()
                    if not isinstance(error, _Elsewhere):
                        raise error
        finally:
            for task in waiting:
                task.cancel()
        return None


class _Elsewhere(Exception):
    """A process cannot answer now; another one, or a lane, may."""


def _send(
    client: CallClient, payloads: Sequence[bytes], left_ms: int
) -> list[asyncio.Future[bytes]]:
    """Send calls; CallLost stands in the future of a call that could not be sent."""
    answers: list[asyncio.Future[bytes]] = []
    for payload in payloads:
        try:
            answers.append(client.call(payload, left_ms))
        except CallLost as error:
            lost: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            lost.set_exception(error)
            answers.append(lost)
    return answers


async def _received(answers: Sequence[asyncio.Future[bytes]]) -> list[SearchResult]:
    """Return the results of calls; the error of a call, or _Elsewhere where asking again may help."""
    try:
        return [cast("SearchResult", decode_result(await answer)) for answer in answers]
    except CallFailed as failed:
        error = error_of(decode(failed.payload, Event))
        if error.http_status >= 500 and not isinstance(error, DeadlineExceeded):
            raise _Elsewhere from error
        raise error from None
    except (CallLost, BadMessage) as error:
        raise _Elsewhere from error


def _in_flight(client: CallClient) -> int:
    return client.in_flight
