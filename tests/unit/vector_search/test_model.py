from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.wire.search import DocumentsWork
from tests.support.vectors import DIMENSION, ask, document, nearness, shard, write

names = st.sampled_from([f"d{i}" for i in range(12)])
numbers = st.integers(0, 3)


class ShardMachine(RuleBasedStateMachine):
    """A shard against a dictionary: writes, background work, snapshots and crashes in any order.

    A crash opens a copy of the files as they lie on the disk at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.copies = 0
        self.one = shard(self.root / "0", exact_below=8)
        self.held: dict[str, tuple[Any, int]] = {}
        self.synced: dict[str, tuple[Any, int]] = {}
        self.writes: list[Any] = []
        self.rng = np.random.default_rng(7)

    def _apply(self, made: Any) -> None:
        self.writes.append(made)
        assert self.one.apply(f"{len(self.writes)}-0", made) == "applied"

    @rule(ids=st.lists(names, min_size=1, max_size=4), n=numbers, chunks=st.integers(1, 3))
    def upsert(self, ids: list[str], n: int, chunks: int) -> None:
        docs = []
        for name in ids:
            vectors = self.rng.standard_normal((chunks, DIMENSION)).astype("<f4")
            self.held[name] = vectors, n
            docs.append(document(name, vectors, "abc", n=n))
        self._apply(write(len(self.writes), docs))

    @rule(ids=st.lists(names, min_size=1, max_size=4))
    def delete(self, ids: list[str]) -> None:
        for name in ids:
            self.held.pop(name, None)
        self._apply(write(len(self.writes), deletes=ids))

    @rule()
    def sync(self) -> None:
        self.one.sync()
        self.synced = dict(self.held)

    @rule(times=st.integers(1, 4))
    def maintain(self, times: int) -> None:
        for _ in range(times):
            self.one.maintain()

    @rule(graph=st.booleans())
    def snapshot(self, graph: bool) -> None:
        self.one.snapshot()
        self.synced = dict(self.held)
        if graph:
            self.one.keep_graph()

    @rule()
    def crash(self) -> None:
        self.copies += 1
        shutil.copytree(self.root / str(self.copies - 1), self.root / str(self.copies))
        self.one.close()
        self.one = shard(self.root / str(self.copies), exact_below=8)
        there = int(self.one.applied.split("-")[0])
        for number, made in enumerate(self.writes):
            expected = "old" if number < there else "applied"
            assert self.one.apply(f"{number + 1}-0", made) == expected
        self.one.sync()
        self.synced = dict(self.held)

    @invariant()
    def what_was_synced_is_found(self) -> None:
        work = DocumentsWork(collection="c1", op="list", with_text=False)
        assert {d.id for d in self.one.documents(work).documents} == set(self.synced)
        for limit in (None, 2):
            kept = {k: v for k, (v, n) in self.synced.items() if limit is None or n < limit}
            rows = [(k, i) for k, v in kept.items() for i in range(len(v))]
            query = self.rng.standard_normal(DIMENSION)
            fields = {} if limit is None else {"filter": {"n": {"$lt": limit}}}
            found = self.one.search(ask(query, 5, **fields)).hits[0]
            assert len(found) == min(5, len(rows))
            for hit in found:
                assert (hit.id, hit.chunk) in rows
                expected = nearness(query, [kept[hit.id][hit.chunk]], "cosine")[0]
                assert abs(hit.score - expected) < 1e-4

    def teardown(self) -> None:
        self.one.close()
        shutil.rmtree(self.root)


TestShardMachine = ShardMachine.TestCase
