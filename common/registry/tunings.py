"""The registry of tunings: the goal of each collection, the progress, and the plan in force."""

from __future__ import annotations

from collections.abc import Callable

from common.bus import Bus
from common.bus.keys import CHANGES, TUNINGS
from common.ids import ulid
from common.redis.replies import hash_of
from common.wire.message import decode, encode
from common.wire.tuning import CollectionTuning


class Tunings:
    """The last tuning of each collection, by the collection's id; a change never overwrites another process' change."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def get(self, collection: str) -> CollectionTuning | None:
        """Return a collection's last tuning; None without one."""
        raw = await self._redis.call("HGET", TUNINGS, collection)
        return None if raw is None else decode(raw, CollectionTuning)

    async def all(self) -> dict[str, CollectionTuning]:
        """Return every collection's last tuning by the collection's id."""
        rows = hash_of(await self._redis.call("HGETALL", TUNINGS))
        return {name.decode(): decode(raw, CollectionTuning) for name, raw in rows.items()}

    async def update(
        self,
        collection: str,
        change: Callable[[CollectionTuning | None], CollectionTuning | None],
    ) -> CollectionTuning | None:
        """Replace a collection's tuning by the result of `change`, and return it; a result of None changes nothing.

        `change` may raise, and may be called again if another process was first.
        """
        while True:  # repeated after a change by another process
            raw = await self._redis.call("HGET", TUNINGS, collection)
            made = change(None if raw is None else decode(raw, CollectionTuning))
            if made is None:
                return None
            args = [collection, raw or b"", encode(made), ulid()]
            if await self._redis.script("place", [TUNINGS, CHANGES], args):
                return made

    async def remove(self, collection: str) -> None:
        """Remove the tuning of a deleted collection."""
        await self._redis.call("HDEL", TUNINGS, collection)
