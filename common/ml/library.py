"""The C++ kernels as a library: one that an image brought along, one built here before, or one built now.

Imports no torch, so that an image can be made without it: `python -m common.ml.library` builds, beside its source, a
library for any processor that the kernels can run on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
# What the kernels are made of; a processor without one of these cannot run them.
NEEDS = frozenset(
    {"avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"}
)
_HERE, _ANYWHERE = ("-march=native",), ("-march=x86-64-v4", "-mavx512bf16")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-w")
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


def brought() -> Path | None:
    """Return the library that lies beside the source and was made from it, or None."""
    path = SOURCE.with_name(f"kernels-{_digest(_ANYWHERE)}.so")
    return path if path.is_file() else None


def build(directory: Path) -> Path | None:
    """Return this machine's library in `directory`, built if need be; None where it is not and nothing can build it.

    OSError or subprocess.SubprocessError if it cannot be built.
    """
    target = directory / f"kernels-{_digest(_HERE, cpu_flags())}.so"
    if target.is_file() and target.stat().st_uid in {os.getuid(), 0}:
        return target
    if compiler() is None:
        return None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _compile(target, _HERE)
    return target


def _digest(march: tuple[str, ...], processor: str = "") -> str:
    made_of = SOURCE.read_bytes() + repr((_FLAGS, march, processor)).encode()
    return hashlib.blake2b(made_of, digest_size=8).hexdigest()


def _compile(target: Path, march: tuple[str, ...]) -> None:
    found = compiler()
    if found is None:
        raise OSError("no C++ compiler: g++ and c++ are not on the PATH")
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        unlinked, linked = Path(work) / "kernels.o", Path(work) / "kernels.so"
        command = [found, *_FLAGS, *march, "-c", str(SOURCE), "-o", str(unlinked)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S)
        # No -fopenmp here: its functions are found in torch's copy, which `Kernels` makes visible.
        command = [found, "-shared", "-o", str(linked), str(unlinked)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S)
        linked.replace(target)


def main() -> int:
    """Build the library that an image brings along; prints its path."""
    target = SOURCE.with_name(f"kernels-{_digest(_ANYWHERE)}.so")
    try:
        _compile(target, _ANYWHERE)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"the kernels were not built: {error}\n")
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
