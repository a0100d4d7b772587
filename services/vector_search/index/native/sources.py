"""The C++ source of the graph search, and the processors its build needs.

`python -m services.vector_search.index.native.sources` builds the library beside the source.
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

if __name__ == "__main__":
    sys.exit(build_beside((TRAVERSE,)))
