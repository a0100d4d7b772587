"""The handle of a replica's shard: the data, or the error why there are none, and the waiting queries."""

from __future__ import annotations

import asyncio
import contextlib

from common.errors import InvalidRequest, NotFound, SpillwayError, Unavailable
from common.wire.search import DocumentsWork
from services.vector_search.shard import Shard
from services.vector_search.write_log import parse_id


class ShardHandle:
    """One shard of a replica: its data (None if dropped, moved or damaged), and the queries that wait for writes."""

    def __init__(self, collection: str, number: int, shard: Shard | SpillwayError) -> None:
        self.collection = collection
        self.number = number
        self.shard = shard if isinstance(shard, Shard) else None
        self.error = shard if isinstance(shard, SpillwayError) else None
        self._advanced = asyncio.Event()

    def restore(self, shard: Shard) -> None:
        """Set the data of a shard that could not be opened before."""
        self.shard, self.error = shard, None
        self.advanced()

    def move(self) -> Shard | None:
        """Return the data and forget them: others hold the shard. Later queries get Unavailable (`shard_missing`)."""
        shard, self.shard = self.shard, None
        self.error = Unavailable(
            f"shard {self.number} of collection {self.collection} is not held here any more",
            code="shard_missing",
            retry_after_s=1,
        )
        self.advanced()
        return shard

    def drop(self) -> Shard | None:
        """Return the data and forget them; later queries get NotFound, since the collection is gone."""
        shard, self.shard = self.shard, None
        self.error = NotFound(
            f"collection {self.collection} was deleted", code="collection_not_found"
        )
        self.advanced()
        return shard

    def advanced(self) -> None:
        """Wake the queries that wait for a write or for a map."""
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def reach(self, after: str, timeout_s: float) -> Shard:
        """Return the shard once it has applied the write `after`; Unavailable (`not_applied`) after `timeout_s`."""
        try:
            wanted = parse_id(after)
        except ValueError as error:
            raise InvalidRequest(f"after: {error}", param="after") from error
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    advanced, shard = self._advanced, self.open()
                    if parse_id(shard.applied) >= wanted:
                        return shard
                    await advanced.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"write {after} has not been applied here yet",
                code="not_applied",
                retry_after_s=1,
            ) from error

    async def drawn(self, work: DocumentsWork, timeout_s: float) -> None:
        """Wait until the map that a work asks for is drawn, or for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    advanced = self._advanced
                    if not self.open().lacks_map(work):
                        return
                    await advanced.wait()

    def open(self) -> Shard:
        """Return the shard's data, or raise the error why there are none."""
        if self.shard is None:
            raise self.error or NotFound("no such shard", code="collection_not_found")
        return self.shard
