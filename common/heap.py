"""The memory that malloc keeps when it is freed, so that the next buffer of its size need not be faulted in again."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


def keep_freed(mebibytes: int) -> None:
    """Let malloc keep up to so much freed memory, buffers of up to a quarter of it among that.

    Does nothing where the C library has no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, mebibytes << 20)
        mallopt(_MMAP_THRESHOLD, mebibytes << 18)
