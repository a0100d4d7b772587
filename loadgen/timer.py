"""A timer that wakes an event loop within tens of microseconds; asyncio's timer rounds up to a millisecond."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time

_libc = ctypes.CDLL(None, use_errno=True)
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_ABSOLUTE = 1


class Timer:
    """Sleeps until moments of `time.monotonic()`, one sleeper at a time; Linux timerfd underneath."""

    def __init__(self) -> None:
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        self._woken = asyncio.Event()
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._fire)

    async def until(self, moment: float) -> None:
        """Return at `moment`, or after one turn of the loop if it has passed."""
        left = moment - time.monotonic()
        if left <= 0 or self._fd < 0:
            await asyncio.sleep(max(left, 0))
            return
        self._woken.clear()
        spec = struct.pack("qqqq", 0, 0, int(moment), int((moment % 1) * 1e9) or 1)
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, spec, None) != 0:
            await asyncio.sleep(left)
            return
        await self._woken.wait()

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._woken.set()
