"""Memory that malloc keeps after `free`, so that the next buffer of that size causes no page faults."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


def keep_freed(mebibytes: int) -> None:
    """Let malloc keep up to `mebibytes` of freed memory, with buffers of up to a quarter of that size.

    Without a C library that has mallopt, this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, mebibytes << 20)
        mallopt(_MMAP_THRESHOLD, mebibytes << 18)
