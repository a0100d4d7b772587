"""A process that puts and gets pages beside a measurement: `python -m bench.workloads.page_traffic URL BUDGET [RATE]`.

It says so on its output once the first page is there; at SIGTERM, or at the end of its input, it says how much it has
moved, in one line of JSON. Nobody is served by it: what it measures is what others feel of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import deque
from types import TracebackType
from typing import Self

import msgspec

from bench import ROOT
from bench.mesh import proc
from common.clock import SystemClock
from common.config import PagesConfig
from common.pages.codec import Header, encode
from common.pages.keys import PageKey
from common.pages.store import PageStore

LAYERS, LAYER_BYTES = 8, 32_000
TTL_S = 60
WRITERS = 2
LATEST = 8  # pages got in one round trip
PATIENCE_S = 30.0  # with a machine that has no core to spare
FULL_S = 0.01  # a writer's patience until the keeper has made room


class Moved(msgspec.Struct):
    """Bytes put and got, how many puts found no room, and the seconds all of it took."""

    put: int = 0
    got: int = 0
    full: int = 0
    seconds: float = 0.0


class Mover:
    """Puts new pages and gets the latest, at most `rate` bytes a second each way; `moved` says how much by now."""

    def __init__(self, store: PageStore, rate: float) -> None:
        self.moved = Moved()
        self._store, self._rate = store, rate
        self._latest: deque[PageKey] = deque(maxlen=LATEST)
        self._began = time.monotonic()

    async def run(self) -> None:
        """Move pages for ever. Raises TierDown."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(self._write())
            group.create_task(self._read())

    async def _write(self) -> None:
        layers = [os.urandom(LAYER_BYTES)] * LAYERS
        while True:
            key = PageKey(os.urandom(16))
            head = Header(
                id=key.id, parent=bytes(16), depth=0, layers=LAYERS, layer_bytes=LAYER_BYTES
            )
            if await self._store.put(key, value := encode(head, layers), TTL_S) == "stored":
                if not self.moved.put:
                    print("moving", flush=True)
                self.moved.put += len(value)
                self._latest.append(key)
                await self._pace(self.moved.put)
            else:
                self.moved.full += 1
                await asyncio.sleep(FULL_S)

    async def _read(self) -> None:
        while True:
            for value in await self._store.get_many(self._latest):
                self.moved.got += len(value or b"")
            await self._pace(self.moved.got)

    async def _pace(self, moved: int) -> None:
        self.moved.seconds = time.monotonic() - self._began
        await asyncio.sleep(max(moved / self._rate - self.moved.seconds, 0))


class PageTraffic:
    """That process beside whoever enters it, on the pages Redis at `url`; `moved` says afterwards what it did.

    `budget` is what that Redis may hold in bytes, `rate` bytes a second each way. RuntimeError if it ends too early.
    """

    def __init__(self, url: str, budget: int, rate: float = math.inf) -> None:
        self.moved = Moved()
        self._argv = [
            sys.executable,
            "-m",
            "bench.workloads.page_traffic",
            url,
            str(budget),
            str(rate),
        ]
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        """Start it; it moves pages when this returns."""
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, cwd=ROOT, stdin=PIPE, stdout=PIPE
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise RuntimeError("page traffic ended before its first page; see its traceback")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End it and read what it moved."""
        told, _ = await self._process.communicate(b"")  # which closes its input
        if not told:
            raise RuntimeError("page traffic ended before its time; see its traceback")
        self.moved = msgspec.json.decode(told, type=Moved)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds it has used since it started."""
        return proc.cpu_seconds(self._process.pid)


async def main(url: str, budget: int, rate: float) -> None:
    """Move pages until told to end."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    with contextlib.suppress(PermissionError):  # no pipe, but a file: the signal is all there is
        loop.add_reader(sys.stdin, ended.set)
    config = PagesConfig(pages_url=url, pages_bytes=budget)
    store = PageStore.of(config, SystemClock(), timeout_s=PATIENCE_S)
    if store is None:
        raise SystemExit(f"no pages Redis at {url!r}: expected redis://, rediss:// or unix://")
    mover = Mover(store, rate)
    moving = asyncio.create_task(mover.run())
    moving.add_done_callback(lambda _: ended.set())
    await ended.wait()
    moving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await moving
    await store.close()
    print(msgspec.json.encode(mover.moved).decode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float([*sys.argv, "inf"][3])))
