"""Announcements of deleted sessions to workers: one bounded stream a family, which each worker reads in order.

An entry holds a digest of the session's id and the ids of its pages, from which a reader learns nothing more. A worker
answers with the number of pages that it forgot. A dead worker needs no answer, since its memory is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from common.bus import Bus, keys, unreadable
from common.bus.connection import BLOCK_MS
from common.ids import Family, family_of
from common.pages.identity import PageId
from common.redis.replies import hash_of
from common.wire.message import decode, encode
from common.wire.registry import Forgot

MOST = 1000  # entries; a worker that finds this many unread may have missed some
KEEP_S = 3600.0
ANSWERS_S = 60.0
_SIZE = 16


class DeletedSession(NamedTuple):
    """One deletion: the id of its entry, the session's digest, and the pages of its turns.

    A session that `goes_on` has lost one turn and may run another one. An unreadable entry has no digest and no pages.
    """

    entry: str
    session: bytes
    ids: list[PageId]
    goes_on: bool = False


def digest_of(session: str) -> bytes:
    """Return the digest by which a deletion names a session."""
    return hashlib.blake2b(session.encode(), digest_size=_SIZE).digest()


class Deletions:
    """Both ends of the stream: announcing a deletion, and answering it."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def announce(self, session: str, ids: Sequence[PageId], *, goes_on: bool = False) -> str:
        """Tell the workers of a session's family to forget it; return the entry's id. BusFull if Redis is full.

        Running turns of the session are dropped, unless it `goes_on`.
        """
        name = keys.forgets(family_of(session))
        packed = b"".join(ids)
        entry: bytes = await self._redis.call(
            *("XADD", name, "MAXLEN", "~", MOST, "*", "s", digest_of(session), "p", packed),
            *(("g", 1) if goes_on else ()),
        )
        await self._redis.call("PEXPIRE", name, int(1000 * KEEP_S))
        return entry.decode()

    async def read(self, family: Family, after: str) -> list[DeletedSession]:
        """Return the deletions after an entry; wait up to a second for one. If there are MOST, some may be missing."""
        command = ("XREAD", "COUNT", MOST, "BLOCK", BLOCK_MS, "STREAMS", keys.forgets(family))
        reply = await self._redis.blocking(*command, after)
        return [_forget(entry.decode(), flat) for _, rows in reply or () for entry, flat in rows]

    async def answer(self, family: Family, entry: str, forgot: Forgot) -> None:
        """Publish a worker's answer to an entry."""
        name = keys.forgotten(family, entry)
        await self._redis.call("HSET", name, forgot.worker, encode(forgot))
        await self._redis.call("PEXPIRE", name, int(1000 * ANSWERS_S))
        bell = keys.forgotten_bell(family, entry)
        await self._redis.call("RPUSH", bell, "1")
        await self._redis.call("PEXPIRE", bell, int(1000 * ANSWERS_S))

    async def await_answer(self, family: Family, entry: str, seconds: float) -> None:
        """Return when an entry has a further answer, or after `seconds`, at most 1."""
        wait_s = max(min(seconds, BLOCK_MS / 1000), 0.01)
        await self._redis.blocking("BLPOP", keys.forgotten_bell(family, entry), wait_s)

    async def answers(self, family: Family, entry: str) -> list[Forgot]:
        """Return the answers that an entry has now."""
        flat = await self._redis.call("HGETALL", keys.forgotten(family, entry))
        return [decode(raw, Forgot) for raw in hash_of(flat).values()]


def _forget(entry: str, flat: Sequence[bytes]) -> DeletedSession:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    session, packed = fields.get(b"s", b""), fields.get(b"p", b"")
    if len(session) == _SIZE and b"p" in fields and len(packed) % _SIZE == 0:
        return DeletedSession(entry, session, _split(packed), b"g" in fields)
    unreadable.note("forgets", "it names no session and its pages", entry=entry)
    return DeletedSession(entry, b"", [])


def _split(packed: bytes) -> list[PageId]:
    return [packed[at : at + _SIZE] for at in range(0, len(packed), _SIZE)]
