"""The rows of a shard: in memory or in a file, they are the same."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.vector_search import documents
from services.vector_search.index import rows as rows_module
from services.vector_search.index.memory import limit_bytes, room_bytes
from services.vector_search.index.rows import IN_MEMORY_BYTES, VectorRows, in_memory_bytes

steps = st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=12)


@given(steps, st.integers(1, 5), st.integers(0, 2**32))
def test_rows_in_a_file_are_as_those_in_memory(
    writes: list[tuple[bool, int]], dimension: int, seed: int
) -> None:
    """Whatever is added and deleted, both hold the same, and an earlier view keeps what it showed."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "IN_MEMORY_BYTES", 100)
        both = VectorRows(dimension, 2), VectorRows(dimension, 2, Path(folder))
        seen = []
        for adds, count in writes:
            size = both[0].view.size
            labels = np.arange(size, size + count)
            vectors = rng.standard_normal((count, dimension)).astype(np.float32)
            gone = rng.integers(0, max(size, 1), count)
            for rows in both:
                rows.append(vectors, labels, labels) if adds else rows.kill(gone)
            views = [rows.view for rows in both]
            assert views[0].size == views[1].size
            assert both[0].dead == both[1].dead
            for name in ("matrix", "labels", "numbers", "live"):
                mine, other = (getattr(view, name)[: view.size] for view in views)
                np.testing.assert_array_equal(mine, other)
            seen.append((views[1], views[1].matrix[: views[1].size].copy()))
        for view, matrix in seen:
            np.testing.assert_array_equal(view.matrix[: view.size], matrix)
        assert list(Path(folder).iterdir()) == []


def test_rows_of_a_process_with_little_memory_lie_in_a_file_sooner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An eighth of what the process may have is the most in memory, and never more than is kept where it has much."""
    assert in_memory_bytes(0) == in_memory_bytes(64 << 30) == IN_MEMORY_BYTES
    assert in_memory_bytes(256 << 20) == 32 << 20

    monkeypatch.setattr(rows_module, "limit_bytes", lambda: 80_000)
    assert VectorRows(10, 250, tmp_path)._file is None
    assert VectorRows(10, 251, tmp_path)._file is not None


def test_a_database_keeps_fewer_pages_where_memory_is_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A connection takes a sixty-fourth of what the process may have, and never more than is kept where it has much."""
    for limit, kept in ((0, 16 << 20), (64 << 30, 16 << 20), (300 << 20, 4800 << 10)):
        monkeypatch.setattr(documents, "limit_bytes", lambda limit=limit: limit)
        with closing(documents.connect(tmp_path / "pages")) as connection:
            (pages,) = connection.execute("PRAGMA cache_size").fetchone()
        assert -pages * 1024 == kept


def test_pages_of_a_file_are_room(tmp_path: Path) -> None:
    """Rows that lie in a file and were read take nothing of what a process may still have."""
    vectors = np.ones((1 << 14, 1024), np.float32)
    before = room_bytes()
    assert before is not None
    assert before <= limit_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "IN_MEMORY_BYTES", 100)
        rows = VectorRows(1024, 1 << 14, tmp_path)
        rows.append(vectors, np.arange(1 << 14), np.arange(1 << 14))
    after = room_bytes()
    assert after is not None
    assert before - after < vectors.nbytes / 2


def test_a_full_disk_leaves_the_rows_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the file finds no room nothing is lost, whenever that is."""
    monkeypatch.setattr(rows_module, "IN_MEMORY_BYTES", 4000)
    rows = VectorRows(10, 16, tmp_path)
    vectors = np.random.default_rng(1).standard_normal((900, 10)).astype(np.float32)

    def add(begin: int, end: int) -> None:
        rows.append(vectors[begin:end], np.arange(begin, end), np.arange(begin, end))

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    add(0, 300)
    assert rows._file is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        add(300, 600)
    assert rows._file is None
    np.testing.assert_array_equal(rows.view.matrix[:600], vectors[:600])
    add(600, 900)
    add(900, 900)
    np.testing.assert_array_equal(rows.view.matrix[:900], vectors)
