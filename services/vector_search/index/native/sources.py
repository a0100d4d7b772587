"""The C++ sources of the searches of a graph and of inverted lists, and of selections, with the processors they need.

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
# The same file for processors without AVX512-VNNI.
TRAVERSE_AVX2 = KernelSource(
    TRAVERSE.path,
    frozenset({"avx2", "fma"}),
    ("-march=x86-64-v3",),
    ("-march=native", "-mno-avx512f"),
)
SELECTION = KernelSource(Path(__file__).parent / "selection.cpp", AVX512, ("-march=x86-64-v4",))
SCAN_LISTS = KernelSource(
    Path(__file__).parent / "scan_lists.cpp",
    AVX512 | {"avx512vbmi", "avx512_vnni"},
    ("-march=x86-64-v4", "-mavx512vbmi", "-mavx512vnni"),
)
# The same file for processors without AVX-512.
SCAN_LISTS_AVX2 = KernelSource(
    SCAN_LISTS.path,
    frozenset({"avx2", "fma"}),
    ("-march=x86-64-v3",),
    ("-march=native", "-mno-avx512f"),
)

if __name__ == "__main__":
    sys.exit(build_beside((TRAVERSE, TRAVERSE_AVX2, SELECTION, SCAN_LISTS, SCAN_LISTS_AVX2)))
