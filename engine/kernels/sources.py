"""The C++ sources of the engine's kernels, and the processors each build needs.

`python -m engine.kernels.sources` builds libraries beside the sources for any processor that can run them.
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
    """Return the builds of a source: the first that a processor can run is the best; the last is plain C++."""
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

if __name__ == "__main__":
    sys.exit(build_beside((ENCODER, *DECODER, *HOST_CHANNEL, *MEMORY)))
