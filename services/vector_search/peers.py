"""Calls to the other vector_search processes: jobs of shards that they hold, and copies of shards."""

from __future__ import annotations

import asyncio

import xxhash

from common.bus import Bus
from common.bus.writes import START
from common.errors import DeadlineExceeded, SpillwayError, Unavailable, rebuild
from common.registry.placements import Placements
from common.transport.call_client import CallClient, CallFailed, CallLost
from common.wire.message import BadMessage, decode, encode
from common.wire.results import Event, Result, decode_result
from common.wire.search import CopyResult, CopyWork, DocumentsWork, SearchWork

CONNECT_S = 2.0
LATE_S = 2.0  # seconds after which the next process that holds the shard is asked


class Peers:
    """Calls the processes of replicas at the addresses that they published, over connections that it keeps."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus, self._name = bus, name
        self._placements = Placements(bus)
        self._clients: dict[str, CallClient] = {}  # by a process' token
        self._opening: dict[str, asyncio.Lock] = {}

    async def holders(self, collection: str, number: int) -> list[str]:
        """Return the names of the other replicas that serve a shard, or apply its writes if it has no placement."""
        placement = await self._placements.get(collection)
        if placement is None:
            applied = await self._bus.writes.applied(collection, number)
            return [n for n, entry in applied.items() if entry != START and n != self._name]
        shards = placement.shards
        return [
            each.name
            for one in shards
            if one.number == number
            for each in one.replicas
            if each.state == "serving" and each.name != self._name
        ]

    async def ask(self, work: SearchWork | DocumentsWork, deadline_ms: int) -> Result:
        """Return the answer of a process that holds the work's shard; Unavailable (`shard_missing`) if none answers."""
        names = await self.holders(work.collection, work.shard)
        for at, name in enumerate(names, 1):
            left_s = (deadline_ms - self._bus.clock.now_ms()) / 1000
            try:
                return await self.call(
                    name, work, left_s if at == len(names) else min(left_s, LATE_S)
                )
            except (Unavailable, DeadlineExceeded) as error:
                if at == len(names) and isinstance(error, DeadlineExceeded):
                    raise
        raise missing(work.collection, work.shard)

    async def call(
        self, name: str, work: SearchWork | DocumentsWork | CopyWork, left_s: float
    ) -> Result:
        """Return the answer of a replica's process; Unavailable if out of reach, DeadlineExceeded after `left_s`."""
        try:
            async with asyncio.timeout(left_s):
                client = await self._client(name, work.collection)
                answer = await client.call(encode(work), int(left_s * 1000))
            return decode_result(answer)
        except CallFailed as failed:
            raise _error(failed) from None
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed before the shard's process answered"
            ) from None
        except (CallLost, BadMessage, OSError, ValueError) as error:
            raise Unavailable(
                f"the vector_search process {name} cannot be reached: {error}", code="shard_missing"
            ) from error

    async def copy(self, name: str, work: CopyWork, left_s: float) -> CopyResult:
        """Return a replica's answer to a CopyWork, as `call` does; Unavailable, too, if its bytes arrived damaged."""
        got = await self.call(name, work, left_s)
        if not isinstance(got, CopyResult):
            raise Unavailable(f"{name} answered a copy with something else", code="shard_missing")
        if got.data and xxhash.xxh3_64_intdigest(got.data) != got.sum:
            raise Unavailable(
                f"a piece of {work.file or work.name} came damaged", code="shard_missing"
            )
        return got

    async def _client(self, name: str, collection: str) -> CallClient:
        family = self._bus.writes.search_family(collection)
        records = [
            r for r in (await self._bus.workers.records(family)).values() if r.replica == name
        ]
        if not any(record.address for record in records):
            raise CallLost("it publishes no address")
        record = max(records, key=lambda each: each.started_ms)
        async with self._opening.setdefault(record.token, asyncio.Lock()):
            client = self._clients.get(record.token)
            if client is None or not client.usable:
                host, _, port = record.address.rpartition(":")
                client = await CallClient.open(host, int(port), record.token, CONNECT_S)
                known = {token: each for token, each in self._clients.items() if each.usable}
                self._clients = known | {record.token: client}
                self._opening = {t: lock for t, lock in self._opening.items() if t in self._clients}
        return client

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()


def missing(collection: str, number: int) -> SpillwayError:
    """Return the error of a shard that no living process serves."""
    return Unavailable(
        f"no process that lives serves shard {number} of collection {collection}",
        code="shard_missing",
        retry_after_s=1,
    )


def _error(failed: CallFailed) -> SpillwayError:
    event = decode(failed.payload, Event)
    details = event.error
    return rebuild(
        event.code,
        event.message,
        status=details.status if details else 0,
        param=details.param if details else None,
        retry_after_s=details.retry_after_s if details else None,
    )
