"""The mixed load of H2 against products that answer at once: the same requests for each, and nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.workloads.mixed_load import (
    CHAT,
    INGEST,
    SEARCH,
    KindLoop,
    MixedLoad,
    StackError,
    StoredText,
    TextCorpus,
    Timing,
)
from bench.workloads.turns import System


class _Stack:
    """Answers at once, and keeps what it was asked."""

    def __init__(self) -> None:
        self.system = System("http://127.0.0.1:9", 1000)
        self.pids: tuple[int, ...] = ()
        self.asked: list[object] = []
        self.stored: set[str] = set()

    async def embed(self, texts: Sequence[str]) -> None:
        self.asked.append(tuple(texts))

    async def search(self, text: str, k: int) -> list[str]:
        self.asked.append(text)
        return ["piece-1"] * k

    async def ingest(self, documents: Sequence[StoredText]) -> None:
        self.stored |= {each.id for each in documents}

    async def remove(self, ids: Sequence[str]) -> None:
        self.stored -= set(ids)


def _corpus() -> TextCorpus:
    stored = [StoredText(f"piece-{n}", f"text {n}") for n in range(40)]
    rows = np.zeros((40, 4), np.float32)
    return TextCorpus(stored, rows, ["who?"], np.zeros((1, 10), np.int64), ["fresh"])


async def test_load_asks_the_same_of_every_product_and_leaves_nothing() -> None:
    """Two products get equal requests, and what was ingested is removed; a chat that fails is recorded with why."""
    first, second = _Stack(), _Stack()
    holds = [await MixedLoad(each, _corpus()).hold(8.0, 0.4, 1) for each in (first, second)]

    assert sorted(map(str, first.asked)) == sorted(map(str, second.asked))
    assert len(first.asked) > 5
    assert first.stored == set()
    for hold in holds:
        assert len(hold.kinds[INGEST]) == 4
        assert all("ClientConnectorError" in each.code for each in hold.kinds[CHAT])
        assert hold.counts(0.0)[SEARCH].asked == len(hold.kinds[SEARCH])


async def test_refusal_is_recorded() -> None:
    """A refused request stands with its code, and counts from when it was due."""

    async def ask(number: int) -> Timing:
        if number:
            raise StackError("status 429: depth")
        return Timing(0.5, 0.01)

    run = await KindLoop(ask).open(iter([0.0, 0.01]), 1.0)

    assert [each.code for each in run.served] == ["", "status 429: depth"]
    assert run.served[0].first_s >= 0.5
