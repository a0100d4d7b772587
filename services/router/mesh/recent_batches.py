"""The batches that encoders ran recently, which the dashboard plots against the fitted cost line.

A worker's record holds its last batch at every heartbeat, so the batches are a sample, one per second while the worker
is busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from common.clock import Clock
from common.ids import Family
from common.wire.registry import WorkerRecord

EVERY_S = 1.0
KEPT = 200
LATELY_S = 60.0


class RecentBatch(NamedTuple):
    """A worker's last batch at time `at_s`, with the `number` of batches and `total` of tokens computed by then."""

    at_s: float
    number: int
    total: int
    items: int
    tokens: int
    seconds: float


class RecentBatches:
    """The latest KEPT batches of each worker, until the worker's record is gone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: dict[Family, dict[str, deque[RecentBatch]]] = {}

    def note(self, family: Family, records: Iterable[WorkerRecord]) -> None:
        """Record the last batch of each of a family's workers, lost workers included; forget all other workers."""
        before, now_s = self._noted.get(family, {}), self._clock.monotonic()
        self._noted[family] = found = {}
        for record in records:
            noted = found[record.worker] = before.get(record.worker) or deque(maxlen=KEPT + 1)
            if not noted or record.batches > noted[-1].number:
                last = (record.batch_items, record.batch_tokens, record.batch_s)
                noted.append(RecentBatch(now_s, record.batches, record.tokens, *last))

    def points(self, family: Family, worker: str) -> list[tuple[int, int, float]]:
        """Return items, tokens and seconds of a worker's batches, oldest first."""
        noted = [batch for batch in self._of(family, worker) if batch.number]
        return [(batch.items, batch.tokens, round(batch.seconds, 6)) for batch in noted[-KEPT:]]

    def tokens(self, family: Family, worker: str) -> int:
        """Return the tokens that a worker computed within LATELY_S, counted from its first record."""
        since_s = self._clock.monotonic() - LATELY_S
        noted = pairwise(self._of(family, worker))
        return sum(b.total - a.total for a, b in noted if b.at_s >= since_s)

    def _of(self, family: Family, worker: str) -> Iterable[RecentBatch]:
        return self._noted.get(family, {}).get(worker, ())
