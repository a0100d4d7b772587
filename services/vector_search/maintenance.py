"""The maintenance of a replica's shards, between queries and writes: indexing, compaction, audits, maps, snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.tasks import in_pool, wait
from services.vector_search.shard_manager import ShardManager

_SNAPSHOT_S = 30.0
_SNAPSHOT_CHECK_S = 1.0
T = TypeVar("T")
_log = log.get("vector_search")


class ShardMaintenance:
    """Maintains all shards of a replica; callers `wake` it when a shard may need maintenance.

    Builds run on one thread of low priority, and maps on another, since users wait for maps. Snapshots run on `writer`,
    since writes wait for them anyway: so logs and streams stay short during a long build.
    """

    def __init__(
        self,
        shards: ShardManager,
        bus: Bus,
        stopping: asyncio.Event,
        *,
        replica: str,
        audit_s: float,
        writer: ThreadPoolExecutor,
    ) -> None:
        self._shards = shards
        self._bus = bus
        self._stopping = stopping
        self._replica = replica
        self._audit_s = audit_s
        self._writer = writer
        self._pool = ThreadPoolExecutor(1, "maintenance", initializer=_be_nice)
        self._drawer = ThreadPoolExecutor(1, "map", initializer=_be_nice)
        self._work = asyncio.Event()
        self._drawing = asyncio.Event()
        self._undrawn: set[Key] = set()  # shards whose map was asked for
        self._touched: set[Key] = set()  # shards that may need maintenance
        self._snapshots: dict[Key, float] = {}

    def wake(self, key: Key | None = None) -> None:
        """Have `run` look at a shard; without a `key`, have `run` and `draw_maps` end their waits, as at a stop."""
        if key is not None:
            self._touched.add(key)
        else:
            self._drawing.set()
        self._work.set()

    def draw(self, key: Key) -> None:
        """Have `draw_maps` draw the map of a shard."""
        self._undrawn.add(key)
        self._drawing.set()

    def forget(self, key: Key) -> None:
        """Forget a shard that is gone."""
        self._touched.discard(key)
        self._undrawn.discard(key)
        self._snapshots.pop(key, None)

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._pool, self._drawer):
            pool.shutdown(wait=False, cancel_futures=True)

    async def finish(self) -> None:
        """Take last snapshots, so that the next start is quick."""
        await self._snapshot_all()
        await self._keep_graphs(self._shards.handles)

    async def run(self) -> None:
        """Index, compact and audit shards whenever they need it, until the stop."""
        time = asyncio.get_running_loop().time
        every_s = min(self._audit_s, _SNAPSHOT_S) / 2
        audited, rounded = time(), time() - every_s
        while not self._stopping.is_set():
            self._work.clear()
            if time() - rounded >= every_s:
                rounded = time()
                self._touched |= self._shards.handles.keys()
            touched, self._touched = self._touched, set()
            for key in touched:
                handle = self._shards.handles.get(key)
                if handle is None or handle.shard is None or self._stopping.is_set():
                    continue
                if await self._run(handle.shard.maintain):
                    self._touched.add(key)
            due = time() - audited >= self._audit_s
            audited = time() if due else audited
            await self._audit(due=due)
            if not self._touched:
                await self._keep_graphs(touched)
                await wait(self._work, every_s)

    async def _audit(self, *, due: bool) -> None:
        for handle in list(self._shards.handles.values()):
            if handle.shard is not None and (due or handle.shard.audit_due):
                await self._run(handle.shard.audit)

    async def _run(
        self, function: Callable[[], T], pool: ThreadPoolExecutor | None = None
    ) -> T | None:
        """Return the result of a shard's function on a thread; None after an error, which is logged."""
        try:
            return await in_pool(pool or self._pool, function)
        except Exception:  # noqa: BLE001 - an error of one shard must not end the service
            _log.exception("tidying_failed")
            return None

    async def draw_maps(self) -> None:
        """Draw the maps that were asked for, one after another, until the stop."""
        while not self._stopping.is_set():
            self._drawing.clear()
            while self._undrawn and not self._stopping.is_set():
                handle = self._shards.handles.get(self._undrawn.pop())
                if handle is None or handle.shard is None:
                    continue
                drawn = await self._run(handle.shard.draw_map, self._drawer)
                if drawn is not None:  # after an error the waiting readers would ask again at once
                    handle.advanced()
            await wait(self._drawing, _SNAPSHOT_S)

    async def take_snapshots(self) -> None:
        """Take snapshots of shards whenever they are due, until the stop: they keep logs and streams short."""
        while not self._stopping.is_set():
            await self._snapshot_all()
            await wait(self._stopping, _SNAPSHOT_CHECK_S)

    async def _snapshot_all(self) -> None:
        now = asyncio.get_running_loop().time()
        for key, handle in list(self._shards.handles.items()):
            shard = handle.shard
            if shard is None or not shard.log_bytes:
                continue
            last = self._snapshots.setdefault(key, now)
            if self._stopping.is_set() or shard.snapshot_due or now - last >= _SNAPSHOT_S:
                self._snapshots[key] = now
                covered = await self._run(shard.snapshot, self._writer)
                if self._shards.splitting(key):
                    continue  # its children may still need these writes: the stream is kept
                if covered is not None and handle.shard is not None:
                    with contextlib.suppress(BusDown, BusFull):
                        await self._bus.writes.publish_snapshot(*key, self._replica, covered)

    async def _keep_graphs(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            handle = self._shards.handles.get(key)
            if handle is not None and handle.shard is not None:
                await self._run(handle.shard.keep_graph)


def _be_nice() -> None:
    """Lower the priority of this thread, and of threads that it starts, below that of searches."""
    os.setpriority(os.PRIO_PROCESS, 0, 10)
