"""Checksums of pages, beside the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import checksums as module
from engine.kernels.checksums import checksums


@given(st.integers(0, 2**31), st.integers(1, 5000), st.integers(0, 9), st.integers(1, 3))
def test_same_as_the_package(seed: int, size: int, count: int, threads: int) -> None:
    """Pieces of any length, at any offset, by one thread or several."""
    draw = np.random.default_rng(seed)
    memory = draw.integers(0, 256, (4, 3000), dtype=np.uint8)
    offsets = draw.integers(0, memory.size - size, count)
    flat = memory.tobytes()
    expected = [xxhash.xxh3_64_intdigest(flat[at : at + size]) for at in offsets]
    assert checksums(memory, offsets, size, threads).tolist() == expected


@pytest.mark.parametrize("size", [240, 241, 1024, 1025, 65_536, 131_072])
def test_kernel_is_used(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a compiler pieces of 241 bytes and more are hashed natively: the package is not asked."""
    if module._kernel() is None:
        pytest.skip("no C++ compiler here")
    memory = np.random.default_rng(1).integers(0, 256, 140_000, dtype=np.uint8)
    expected = [xxhash.xxh3_64_intdigest(memory[at : at + size].tobytes()) for at in (0, 7)]
    asked: list[int] = []

    def counted(piece: bytes) -> int:
        asked.append(len(piece))
        return 0

    monkeypatch.setattr("xxhash.xxh3_64_intdigest", counted)
    found = checksums(memory, np.array([0, 7]), size)
    assert (found.tolist() == expected) == (not asked) == (size > 240)
