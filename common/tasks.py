"""Waiting for an event, for a while."""

from __future__ import annotations

import asyncio


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Return once `event` is set, or after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
