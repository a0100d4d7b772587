"""C++ kernels as libraries: one that an image or a wheel brought along, one built here before, or one built now.

Needs the standard library only, so that images and wheels can be made without the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_HERE = ("-march=native",)


class KernelSource(NamedTuple):
    """A file of kernels, what a processor must have to run them, and the flags that compile them for any such one.

    `here` are the flags that compile them for this machine.
    """

    path: Path
    needs: frozenset[str]
    anywhere: tuple[str, ...]
    here: tuple[str, ...] = _HERE


# What a processor with AVX-512 has, of whichever maker.
AVX512 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
# Products and sums are joined where the source says so and nowhere else: the same bits wherever a line is inlined.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w")
_BUILD_S = 120


def cpu_flags() -> str:
    """Return the first processor's model and flags, by which a build is known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return " ".join(line for line in lines[:30] if line.startswith(("model", "flags")))


def compiler() -> str | None:
    """Return the C++ compiler of this machine, or None."""
    return shutil.which("g++") or shutil.which("c++")


def brought(source: KernelSource) -> Path | None:
    """Return the library that lies beside the source and was made from it, or None."""
    path = beside(source)
    return path if path.is_file() else None


def build(source: KernelSource, directory: Path) -> Path | None:
    """Return this machine's library in `directory`, built if need be; None where it is not and nothing can build it.

    OSError or subprocess.SubprocessError if it cannot be built.
    """
    target = directory / _name(source, source.here, cpu_flags())
    if target.is_file() and target.stat().st_uid in {os.getuid(), 0}:
        return target
    if compiler() is None:
        return None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _one_at_a_time(target):
        if not target.is_file():
            _compile(source, target, source.here)
    return target


def compiled_for(source: KernelSource, directory: Path) -> Path:
    """Return the library of a source for any processor that can run it, in `directory`, built if need be."""
    target = directory / _name(source, source.anywhere)
    if not target.is_file():
        _compile(source, target, source.anywhere)
    return target


def beside(source: KernelSource) -> Path:
    """Return where an image or a wheel has the library for any processor, whether it is there or not."""
    return source.path.with_name(_name(source, source.anywhere))


def _name(source: KernelSource, march: tuple[str, ...], processor: str = "") -> str:
    files = [source.path, *sorted(source.path.parent.glob("*.h"))]
    made_of = b"".join(path.read_bytes() for path in files)
    made_of += repr((_FLAGS, march, processor)).encode()
    return f"{source.path.stem}-{hashlib.blake2b(made_of, digest_size=8).hexdigest()}.so"


@contextlib.contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    """Let one process build a library while the others that need the same one wait for it."""
    with target.with_suffix(".lock").open("ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: each builds its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(source: KernelSource, target: Path, march: tuple[str, ...]) -> None:
    found = compiler()
    if found is None:
        raise OSError("no C++ compiler: g++ and c++ are not on the PATH")
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        unlinked, linked = Path(work) / "kernels.o", Path(work) / "kernels.so"
        command = [found, *_FLAGS, *march, "-c", str(source.path), "-o", str(unlinked)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S)
        # No -fopenmp here: its functions are found in torch's copy, which `Kernels` makes visible.
        command = [found, "-shared", "-o", str(linked), str(unlinked)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S)
        linked.replace(target)


def build_beside(sources: Iterable[KernelSource]) -> int:
    """Build what an image or a wheel brings along, beside the sources; print the paths, return a status."""
    for source in sources:
        try:
            print(compiled_for(source, source.path.parent))
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"{source.path.name} was not built: {error}\n")
            return 1
    return 0
