"""The C++ sources of the graph search and of selections, and the processors their builds need.

`python -m services.vector_search.index.native.sources` builds the libraries beside the sources.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.native.library import AVX512, KernelSource, build_beside

TRAVERSE = KernelSource(
    Path(__file__).parent / "traverse.cpp",
    AVX512 | {"avx512_vnni"},
    ("-march=x86-64-v4", "-mavx512vnni"),
)
SELECTION = KernelSource(Path(__file__).parent / "selection.cpp", AVX512, ("-march=x86-64-v4",))

if __name__ == "__main__":
    sys.exit(build_beside((TRAVERSE, SELECTION)))
