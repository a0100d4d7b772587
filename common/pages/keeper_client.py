"""The page keeper's client of the pages Redis: its lease, the requests to it, and the pages to evict.

One kv_store at a time is the keeper. Every call raises TierDown if the pages Redis is away. A member, size or request
that cannot be decoded is skipped and reported to `skipped` with the reason, so that it does not block the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from redis.exceptions import OutOfMemoryError, ResponseError

from common.pages import keys as names
from common.pages.identity import Owner
from common.pages.keys import GROUPS, PARTITIONS, PageKey, of_member
from common.pages.store import PageStore, sized
from common.redis.lock import RedisLock

NEARLY = 0.97  # of a server's maxmemory
_AT_ONCE = 64
_OWNER_BYTES = 8
_NOTICES = 16  # stored notices of erasures, of which waiting processes need only the last
Skipped = Callable[[str], None]
Room = Mapping[tuple[int, Owner | None], int]  # the largest refused page, by partition and owner


class StoredPage(NamedTuple):
    """One page in Redis: its key, its size in bytes, its owner, and the end of its pin (ms; 0: not pinned)."""

    key: PageKey
    size: int
    owner: Owner
    pinned_ms: float = 0


class EraseRequests(NamedTuple):
    """The oldest requests to erase pages: the pages, and the list's members that name them."""

    keys: list[PageKey]
    members: list[bytes]


class KeeperClient:
    """Runs the keeper's commands; `name` is this process' name, `life_ms` the life of its lease without renewal."""

    def __init__(self, store: PageStore, name: str, life_ms: int, skipped: Skipped) -> None:
        self._store, self._server, self._name, self._skipped = store, store.server, name, skipped
        self.lock = RedisLock(self._server.call, names.KEEPER, name, life_ms, store.clock)

    # -- requests --------------------------------------------------------------------------------------

    async def room(self, wait_s: float) -> Room:
        """Wait for requests for room; return the largest refused page, by partition and owner."""
        found: dict[tuple[int, Owner | None], int] = {}
        for word in await self._pop(names.ROOM, wait_s):
            try:
                place, size = _room(word)
            except ValueError:
                self._skipped(f"{word[:80]!r}: expected <partition>:<bytes>[:<owner>]")
                continue
            found[place] = max(found.get(place, 0), size)
        return found

    async def recalls(self, wait_s: float) -> list[PageKey]:
        """Wait for requests to bring pages from disk; return those pages."""
        return self.keys_of(await self._pop(names.RECALL, wait_s))

    async def _pop(self, name: str, wait_s: float) -> list[bytes]:
        rung = await self._server.call("BLPOP", name, wait_s)
        if rung is None:
            return []
        more = await self._server.call("LPOP", name, _AT_ONCE)
        return [rung[1], *(more or ())]

    async def erasures(self) -> EraseRequests:
        """Return the oldest requests to erase pages, which stay in their list until `erased` is called."""
        members = await self._server.call("LRANGE", names.ERASE, 0, _AT_ONCE - 1)
        return EraseRequests(self.keys_of(members), members)

    async def erased(self, members: Sequence[bytes]) -> bool:
        """Remove requests that were carried out; False, without removing any, if this process has lost the lease."""
        heads = (names.KEEPER, names.ERASE)
        return bool(await self._server.script("erased", heads, (self._name, *members)))

    async def announce_erased(self) -> None:
        """Wake processes that wait for erasures; a full server stores no notice, but these processes also poll."""
        try:
            await self._server.call("XADD", names.ERASED, "MAXLEN", _NOTICES, "*", "e", "")
        except OutOfMemoryError:
            return

    def keys_of(self, members: Iterable[bytes]) -> list[PageKey]:
        """Return the pages named by members, each once."""
        keys = []
        for member in dict.fromkeys(members):
            try:
                key = of_member(member)
                if not 0 <= key.group < GROUPS:
                    raise ValueError(f"page {member!r}: expected a group below {GROUPS}")
            except ValueError as error:
                self._skipped(str(error))
                continue
            keys.append(key)
        return keys

    # -- the last keeper -------------------------------------------------------------------------------

    async def last_keeper(self) -> str | None:
        """Return the last keeper's recorded name; None if the server has none."""
        name: bytes | None = await self._server.call("GET", names.LAST)
        return None if name is None else name.decode(errors="replace")

    async def note_keeper(self, name: str) -> None:
        """Record the keeper's name: its directory's name, or its process' name without a directory."""
        await self._server.script("note", (names.LAST,), (name,))

    # -- pages to evict --------------------------------------------------------------------------------

    async def oldest(self, partition: int, start: int, count: int) -> tuple[list[StoredPage], bool]:
        """Return up to `count` pages of a partition, longest unused first, from position `start` on.

        The second result is True if the partition has no page from `start` on.
        """
        members = await self._server.call(
            "ZRANGE", names.index(partition), start, start + count - 1
        )
        if not members:
            return [], True
        sizes, pins = await self._server.pipeline(
            [
                ("HMGET", names.sizes(partition), *members),
                ("ZMSCORE", names.pins(partition), *members),
            ]
        )
        found = []
        for member, told, pin in zip(members, sizes, pins, strict=True):
            try:
                size, owner = sized(told)
                found.append(StoredPage(of_member(member, partition), size, owner, float(pin or 0)))
            except ValueError as error:
                self._skipped(str(error))
        return found, False

    async def lives(self, keys: Sequence[PageKey]) -> dict[PageKey, tuple[int, Owner]]:
        """Return the expiry (ms) and the owner of pages; expired pages are left out."""
        told = await self._server.pipeline(
            [("PTTL", names.value(key)) for key in keys]
            + [("HGET", names.sizes(key.partition), key.member) for key in keys]
        )
        found = {}
        for key, left_ms, size in zip(keys, told[: len(keys)], told[len(keys) :], strict=True):
            if isinstance(left_ms, ResponseError) or left_ms <= 0:
                continue
            try:
                found[key] = self._store.now_ms() + left_ms, sized(size)[1]
            except ValueError as error:
                self._skipped(str(error))
        return found

    async def value(self, key: PageKey) -> bytes | None:
        """Return a page's value without recording a use."""
        value: bytes | None = await self._server.call("GET", names.value(key))
        return value

    async def excess_bytes(self) -> int:
        """Return the bytes by which servers exceed 97 % of their memory limits, by their own count."""
        over = 0
        for call in await self._server.callers():
            told = dict(
                line.split(b":", 1)
                for line in (await call("INFO", "memory")).split()
                if b":" in line
            )
            most = int(told.get(b"maxmemory", 0))
            if most:
                over += max(int(told[b"used_memory"]) - int(NEARLY * most), 0)
        return over

    async def set_limits(self, limits: Mapping[Owner, int]) -> None:
        """Store the owners' limits, beyond which the script `put` refuses pages; each partition has a sixteenth."""
        parts = range(PARTITIONS)
        wanted = {owner.hex(): most // PARTITIONS for owner, most in limits.items()}
        told = await self._server.pipeline([("HKEYS", names.limits(at)) for at in parts])
        commands: list[tuple[object, ...]] = []
        for at, known in zip(parts, told, strict=True):
            gone = [owner for owner in known if owner.decode(errors="replace") not in wanted]
            if gone:
                commands.append(("HDEL", names.limits(at), *gone))
            if wanted:
                words = [word for pair in wanted.items() for word in pair]
                commands.append(("HSET", names.limits(at), *words))
        await self._server.pipeline(commands)


def _room(word: bytes) -> tuple[tuple[int, Owner | None], int]:
    at, size, *owner = word.decode("ascii").split(":")
    whose = bytes.fromhex(owner[0]) if owner else None
    place = int(at), int(size)
    if not 0 <= place[0] < PARTITIONS or place[1] < 0 or len(owner) > 1:
        raise ValueError(word)
    if whose is not None and len(whose) != _OWNER_BYTES:
        raise ValueError(word)
    return (place[0], whose), place[1]
