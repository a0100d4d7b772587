"""Memory that processes of one machine share: without a name, passed on as a descriptor, freed by its last holder."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Literal

PageKind = Literal["hugetlb", "transparent", "small"]
LARGE = 2 << 20
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
# Linux' numbers, not all of which Python has.
_MFD_HUGE_2MB = 21 << 26
_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10


class MemorySegment:
    """Memory of this process that other processes can map; `take` allocates parts.

    `file` is its descriptor, -1 on a system without shared memory of this kind; `page_kind` is the kind of its pages:
    reserved pages of 2 MiB (`hugetlb`), pages of 2 MiB as the system finds them (`transparent`), or `small` ones.
    """

    def __init__(self, size: int, *, large: bool = True) -> None:
        """Allocate zeroed memory, in pages of 2 MiB if possible; OSError if there is no memory.

        Without `large` no reserved pages are used.
        """
        self.size = -(-max(1, size) // LARGE) * LARGE
        found = (_large(self.size) if large else None) or _plain(self.size)
        self.file, self.memory, self.page_kind = found
        if self.file >= 0:
            weakref.finalize(self, os.close, self.file)
        self._taken = 0

    def take(self, size: int) -> int:
        """Return the offset of a new part of `size` bytes, at a page of 2 MiB; ValueError if the part does not fit."""
        begin = self._taken
        if begin + size > self.size:
            raise ValueError(f"{size} bytes do not fit after {begin} of {self.size}")
        self._taken = -(-(begin + size) // LARGE) * LARGE
        return begin

    def seal(self, *, read_only: bool) -> None:
        """Forbid all processes to change the size, and, with `read_only`, to map the memory for writing from now on.

        On a system without such seals this does nothing.
        """
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            if read_only:
                fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)


def attach(file: int, size: int, *, writable: bool) -> mmap.mmap:
    """Map `size` bytes of another process' segment; OSError if the limits of this process forbid it."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED, prot=access)
    _advise(memory)
    return memory


def _large(size: int) -> tuple[int, mmap.mmap, PageKind] | None:
    """Return a segment of reserved pages of 2 MiB, all allocated now; None if there are not enough."""
    if sys.platform != "linux":
        return None
    file = -1
    try:
        file = os.memfd_create(
            "spillway",
            os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | _MFD_HUGE_2MB,
        )
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        # A write beyond the cgroup's limit of such pages would kill the process; this call raises an error instead.
        memory.madvise(_MADV_POPULATE_WRITE)
    except (OSError, ValueError):
        if file >= 0:
            os.close(file)
        return None
    return file, memory, "hugetlb"


def _plain(size: int) -> tuple[int, mmap.mmap, PageKind]:
    if sys.platform != "linux":
        return -1, mmap.mmap(-1, size), "small"
    file = os.memfd_create("spillway", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
    except BaseException:
        os.close(file)
        raise
    _advise(memory)
    return file, memory, "transparent" if _transparent() else "small"


def _advise(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def _transparent() -> bool:
    """Return whether the system gives shared memory pages of 2 MiB on request."""
    with contextlib.suppress(OSError):
        chosen = _SHMEM.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
        return chosen in {"always", "within_size", "advise", "force"}
    return False
