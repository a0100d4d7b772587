"""The run of a load by the command line's options, with one line a second on standard error."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from loadgen import arrivals
from loadgen.loop import LoadLoop, Timed

R = TypeVar("R", bound=Timed)
T = TypeVar("T")


async def driven(
    load: LoadLoop[R],
    options: argparse.Namespace,
    done: Callable[[], Sequence[T]],
    told: Callable[[Sequence[T]], tuple[dict[str, Any], str]],
) -> R:
    """Run `load` open or closed; `told` adds its summary of a second's part of `done()` to each line."""
    watcher = asyncio.create_task(_watch(load, done, told))
    try:
        if options.mode == "closed":
            return await load.closed(options.clients, seconds=options.seconds)
        times = arrivals.named(
            options.arrivals, options.rate, options.seed, burst=options.burst, path=options.trace
        )
        return await load.open(times, options.seconds)
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _watch(
    load: LoadLoop[R],
    done: Callable[[], Sequence[T]],
    told: Callable[[Sequence[T]], tuple[dict[str, Any], str]],
) -> None:
    seen, began = 0, time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        fresh = done()[seen:]
        seen += len(fresh)
        part, more = told(fresh)
        line = (
            f"{time.monotonic() - began:5.0f} s  {part['ok']:6d} ok  {part['refused']:4d} refused  "
            f"{part['errors']:4d} errors  {load.in_flight:5d} open"
        )
        print(line + more, file=sys.stderr, flush=True)
