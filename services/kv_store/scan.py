"""One walk over everything a store holds, for sessions older than the indexes: what belongs to some requests.

A request's id, its stages' job ids and every key made from them hold one ulid, so what belongs to a set of requests is
what names one of their ulids: in its key, in the job field of a dead letter, a journal's ring or a lane's entry, or in
the value of an idempotency claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from common.bus import Bus
from services.kv_store.found import CLAIMS, DEAD, JOURNAL, LANE, STREAMS, ScanResult, ulids_in

_BATCH = 1000
_ROWS = {DEAD: 20, JOURNAL: 500, LANE: 20}  # payloads may be large
_AT_ONCE = 32


async def walk(bus: Bus, ulids: Collection[str], spare: Collection[str] = ()) -> ScanResult:
    """Look at every key of every server; `spare` names keys to leave out. Raises BusDown."""
    found = ScanResult(walked=True)
    for caller in bus.connection.callers():
        found.servers += 1
        async for names in _names(caller):
            found.scanned += len(names)
            await _look(bus, names, ulids, spare, found)
    return found


async def _names(caller: Any) -> AsyncIterator[list[str]]:
    cursor: Any = b"0"
    while True:
        cursor, raw = await caller("SCAN", cursor, "COUNT", _BATCH)
        yield [name.decode(errors="replace") for name in raw]
        if cursor in {b"0", 0}:
            return


async def _look(
    bus: Bus, names: list[str], ulids: Collection[str], spare: Collection[str], found: ScanResult
) -> None:
    streams, claims = [], []
    for name in names:
        if name in spare or name in found.keys:
            continue
        if any(ulid in ulids for ulid in ulids_in(name)):
            found.keys.add(name)
        elif name.startswith(CLAIMS):
            claims.append(name)
        elif name.startswith("{") and any(part in name for part in STREAMS):
            streams.append(name)
    for name in streams:
        await _stream(bus, name, ulids, found)
    for at in range(0, len(claims), _AT_ONCE):
        some = claims[at : at + _AT_ONCE]
        values = await asyncio.gather(*(bus.connection.call("GET", name) for name in some))
        found.read[CLAIMS] += len(some)
        for name, value in zip(some, values, strict=True):
            request = (value or b"")[16:].decode(errors="replace")
            if any(ulid in ulids for ulid in ulids_in(request)):
                found.claims.add(name)


async def _stream(bus: Bus, name: str, ulids: Collection[str], found: ScanResult) -> None:
    kind = next(part for part in STREAMS if part in name)
    if await bus.connection.call("TYPE", name) != b"stream":
        return
    after, most = "-", _ROWS[kind]
    while True:
        rows = await bus.connection.call("XRANGE", name, after, "+", "COUNT", most)
        found.read[kind] += len(rows)
        for entry, flat in rows:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            job = (fields.get(b"j") or fields.get(b"job") or b"").decode(errors="replace")
            if any(ulid in ulids for ulid in ulids_in(job)):
                found.entries.setdefault(name, {})[entry] = job
        if len(rows) < most:
            return
        after = "(" + rows[-1][0].decode()
