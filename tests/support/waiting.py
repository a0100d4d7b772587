"""Wait for a condition that no event announces: another process' state, a key of Redis, a metric."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")
LIMIT_S = 90.0  # ends a test that has failed; a condition that comes true is never timed
AGAIN_S = 0.02


@overload
async def until(
    condition: Callable[[], Awaitable[T]], what: str = "", *, seconds: float = LIMIT_S
) -> T: ...
@overload
async def until(condition: Callable[[], T], what: str = "", *, seconds: float = LIMIT_S) -> T: ...
async def until(
    condition: Callable[[], object], what: str = "", *, seconds: float = LIMIT_S
) -> object:
    """Return the first true value of a condition, which may be a coroutine function.

    AssertionError with the condition's last value if none is true within `seconds`.
    """
    give_up = time.monotonic() + seconds
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(_never(what, seconds, value))
        await asyncio.sleep(AGAIN_S)


def until_sync(condition: Callable[[], T], what: str = "", *, seconds: float = LIMIT_S) -> T:
    """Return the first true value of a condition, blocking the thread; errors as for `until`."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise AssertionError(_never(what, seconds, value))
        time.sleep(AGAIN_S)
    return value


def _never(what: str, seconds: float, value: object) -> str:
    return f"{what or 'the condition'} was not true within {seconds:g} s; its last value: {value!r}"
