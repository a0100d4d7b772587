"""Find what a quiet bus still holds and must not hold."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio

SETTLE_S = 20.0


async def leftovers(url: str) -> list[str]:
    """Return what a quiet bus must not hold: dead letters, use above zero, entries on a lane.

    What a dead process held is given up only when its heartbeat has lapsed and another has done it.
    """
    limit = time.monotonic() + SETTLE_S
    while (wrong := await _left(url)) and time.monotonic() < limit:  # noqa: ASYNC110 - no event of it
        await asyncio.sleep(0.2)
    return wrong


async def _left(url: str) -> list[str]:
    wrong = []
    client = redis.asyncio.from_url(url, decode_responses=True)
    try:
        wrong += [f"dead letters in {key}" async for key in client.scan_iter(match="*:dead")]
        async for key in client.scan_iter(match="*:use"):
            use = {str(n): str(v) for n, v in (await client.hgetall(key)).items()}
            held = {n: v for n, v in use.items() if v != "0" and n.endswith((":items", ":tokens"))}
            wrong += [f"{key} holds {name} = {value}" for name, value in held.items()]
        async for key in client.scan_iter(match="*:lane:*", _type="stream"):
            length = await client.xlen(key)
            wrong += [f"{key} holds {length} entries"] if length else []
    finally:
        await client.aclose()
    return wrong
