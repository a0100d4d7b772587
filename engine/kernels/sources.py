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
_STEP = _FOLDER / "decoder" / "step.cpp"
# The first that a processor can run; the last is plain C++.
DECODER = (
    KernelSource(
        _STEP,
        AVX512 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    ),
    KernelSource(_STEP, AVX512, ("-march=x86-64-v4",)),
    KernelSource(_STEP, frozenset({"avx2", "fma", "f16c"}), ("-march=x86-64-v3",)),
    KernelSource(_STEP, frozenset(), ()),
)

if __name__ == "__main__":
    sys.exit(build_beside((ENCODER, *DECODER)))
