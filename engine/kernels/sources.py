"""The C++ sources of the engine's kernels, and the processor features that each build needs.

`python -m engine.kernels.sources` builds all libraries, for every kind of processor, beside their sources.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.native.library import AVX512, KernelSource, build_beside

_FOLDER = Path(__file__).parent
ENCODER = KernelSource(
    _FOLDER / "encoder.cpp", AVX512 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")
)


def _builds(path: Path) -> tuple[KernelSource, ...]:
    """Return the builds of a source, the fastest first; the last build is plain C++ and runs on every processor."""
    return (
        KernelSource(
            path,
            AVX512 | {"avx512_bf16", "avx512_vnni"},
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        ),
        KernelSource(path, AVX512, ("-march=x86-64-v4",)),
        KernelSource(path, frozenset({"avx2", "fma", "f16c"}), ("-march=x86-64-v3",)),
        KernelSource(path, frozenset(), ()),
    )


DECODER = _builds(_FOLDER / "decoder" / "step.cpp")
HOST_CHANNEL = _builds(_FOLDER / "decoder" / "host_channel.cpp")
MEMORY = _builds(_FOLDER / "memory.cpp")
CHECKSUMS = _builds(_FOLDER / "checksums.cpp")

if __name__ == "__main__":
    sys.exit(build_beside((ENCODER, *DECODER, *HOST_CHANNEL, *MEMORY, *CHECKSUMS)))
