from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from common.errors import Unavailable
from common.wire.search import DocumentsWork, Write
from services.vector_search.shard import Shard
from tests.support.vectors import DIMENSION, ask, document, full_disk, settle, shard, write

EYE = np.eye(DIMENSION)


def _held(one: Shard) -> set[str]:
    work = DocumentsWork(collection="c1", op="list", limit=10_000, with_text=False)
    return {doc.id for doc in one.documents(work).documents}


_CHILD = """
import sys
from pathlib import Path
from tests.support.vectors import DIMENSION, document, shard, write
import numpy as np
one = shard(Path(sys.argv[1]), snapshot_bytes=20_000, exact_below=50)
start = int(one.applied.split("-")[0])
for n in range(start, start + 100_000):
    one.apply(f"{n + 1}-0", write(n, [document(str(n), np.eye(DIMENSION)[n % DIMENSION], "text")]))
    one.sync()
    print(n, flush=True)
    one.maintain()
    if one.snapshot_due:
        one.snapshot()
        one.keep_graph()
"""


def test_kill_9_at_any_moment_loses_no_synced_write(tmp_path: Path, seed: int) -> None:
    """A process is killed while it writes, indexes and takes snapshots: what it had synced is there, unbroken."""
    rng = np.random.default_rng(seed)
    synced = -1
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(int(rng.integers(20, 200))):
                synced = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        synced = int(rest[-1]) if rest and rest[-1].isdigit() else synced
        one = shard(tmp_path, exact_below=50)
        held = _held(one)
        assert held == {str(n) for n in range(len(held))}
        assert len(held) > synced
        settle(one)
        assert len(one.search(ask(np.ones(DIMENSION), 500)).hits[0]) == min(500, len(held))
        one.close()


def test_a_log_cut_at_any_byte_recovers_from_log_or_stream(tmp_path: Path) -> None:
    """With the database behind the log (power loss), a torn log gives its whole records; the rest is applied again."""
    one = shard(tmp_path / "full")
    one.close()
    shutil.copytree(tmp_path / "full", tmp_path / "empty")
    one = shard(tmp_path / "full")
    writes = [write(n, [document(str(n), EYE[n], "t")]) for n in range(3)]
    for n, each in enumerate(writes):
        one.apply(f"{n + 1}-0", each)
        one.sync()
    one.close()
    name = next((tmp_path / "full" / "0").glob("writes.*")).name
    data = (tmp_path / "full" / "0" / name).read_bytes()
    for size in range(0, len(data), 23):
        directory = tmp_path / f"cut{size}"
        shutil.copytree(tmp_path / "empty", directory)
        (directory / "0" / name).write_bytes(data[:size])
        one = shard(directory)
        there = int(one.applied.split("-")[0])
        assert _held(one) == {str(n) for n in range(there)}
        for n, each in enumerate(writes):
            expected = "old" if n < there else "applied"
            assert one.apply(f"{n + 1}-0", each) == expected
        one.sync()
        assert _held(one) == {"0", "1", "2"}
        one.close()
        shutil.rmtree(directory)


@pytest.mark.parametrize("pattern", ["graph.*", "labels.*", "snapshot.json"])
def test_a_damaged_snapshot_is_not_used(tmp_path: Path, pattern: str) -> None:
    """A flipped bit in any file of a snapshot: the graph is built again, and nothing is missing."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, DIMENSION))
    one = shard(tmp_path, exact_below=100)
    one.apply("1-0", write(0, [document(str(i), v) for i, v in enumerate(x)]))
    one.sync()
    settle(one)
    assert (one.snapshot(), one.keep_graph()) == ("1-0", True)
    one.close()
    path = next((tmp_path / "0").glob(pattern))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    one = shard(tmp_path, exact_below=100)
    assert one.stats()["index"] == "exact"
    assert one.search(ask(x[7], 1)).hits[0][0].id == "7"
    settle(one)
    assert one.stats()["index"] == "graph"
    assert one.search(ask(x[7], 1)).hits[0][0].id == "7"
    one.close()


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    """A database that is none stops the opening with the shard's name; it is neither emptied nor overwritten."""
    one = shard(tmp_path)
    one.apply("1-0", write(0, [document("a", EYE[0])]))
    one.sync()
    one.close()
    path = tmp_path / "0" / "documents.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(Unavailable) as caught:
        shard(tmp_path)
    assert caught.value.code == "shard_damaged"
    assert "c1/0" in caught.value.message
    assert path.read_bytes() == b"no database" * 1000


def _apply_all(one: Shard, writes: list[Write]) -> None:
    for n, each in enumerate(writes):
        one.apply(f"{n + 2}-0", each)
        one.sync()


@pytest.mark.parametrize("room", [0, 100, 5_000, 40_000])
def test_a_full_disk_puts_writes_off_and_loses_nothing(tmp_path: Path, room: int) -> None:
    """While the disk is full writes fail with `disk_full` and searches go on; with space the same writes succeed."""
    one = shard(tmp_path)
    one.apply("1-0", write(0, [document("a", EYE[0])]))
    one.sync()
    sizes = [path.stat().st_size for path in (tmp_path / "0").iterdir()]
    big = [write(n + 1, [document(f"b{n}", EYE[1], "x" * 50_000)]) for n in range(3)]
    with full_disk(max(sizes) + room):
        with pytest.raises(Unavailable) as caught:
            _apply_all(one, big)
        assert caught.value.code == "disk_full"
        assert one.search(ask(EYE[0], 1)).hits[0][0].id == "a"
    before = int(one.applied.split("-")[0])
    for n, each in enumerate(big):
        assert one.apply(f"{n + 2}-0", each) == ("old" if n + 2 <= before else "applied")
    one.sync()
    assert _held(one) == {"a", "b0", "b1", "b2"}
    one.close()
    one = shard(tmp_path)
    assert (_held(one), one.applied) == ({"a", "b0", "b1", "b2"}, "4-0")
    assert len(one.search(ask(EYE[1], 10)).hits[0]) == 4
    one.close()


def test_search_while_writing(tmp_path: Path, seed: int) -> None:
    """Searches beside upserts, deletes, indexing, compaction and snapshots never fail and never lack a stable hit."""
    rng = np.random.default_rng(seed)
    stable = rng.standard_normal((600, DIMENSION))
    one = shard(tmp_path, exact_below=200, snapshot_bytes=100_000)
    one.apply("1-0", write(0, [document(f"s{i}", v, "t", s=1) for i, v in enumerate(stable)]))
    one.sync()
    settle(one)
    over = threading.Event()
    errors: list[BaseException] = []

    def guarded(step: object) -> None:
        try:
            while not over.is_set():
                step()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)
            over.set()

    def search() -> None:
        i = int(np.random.default_rng(os.getpid()).integers(600))
        found = one.search(ask(stable[i : i + 2], 5, filter={"s": 1}))
        assert [len(hits) for hits in found.hits] == [5] * len(found.hits)
        assert found.hits[0][0].id == f"s{i}"
        assert len(one.search(ask(rng.standard_normal((3, DIMENSION)), 5)).hits[1]) == 5

    def tidy() -> None:
        one.maintain()
        one.audit()
        if one.snapshot_due:
            one.snapshot()
        one.keep_graph()

    threads = [threading.Thread(target=guarded, args=(step,)) for step in (search, search, tidy)]
    for thread in threads:
        thread.start()
    for n in range(80):
        names = [f"v{k}" for k in np.random.default_rng(n).integers(0, 400, 20)]
        vectors = np.random.default_rng(n).standard_normal((20, DIMENSION))
        docs = [document(a, v, "u", s=0) for a, v in zip(names, vectors, strict=True)]
        one.apply(f"{n + 2}-0", write(n + 1, docs))
        one.apply(f"{n + 2}-1", write(n + 1000, deletes=names[:8]))
        one.sync()
        if over.is_set():
            break
    over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    one.close()
