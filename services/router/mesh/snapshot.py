"""The whole mesh at one moment: its lanes and its workers, read from the bus on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from common.bus import Bus, LaneState
from common.ids import Family
from common.registry.collections import Collections
from common.registry.latest_steps import LatestSteps
from common.wire.registry import StepRecord, WorkerRecord
from services.router.admission.policy import SESSIONS, request_families
from services.router.cards import Cards

FRESH_S = 0.8


class FamilyState(NamedTuple):
    """One family's lanes by class, its workers (True: living, False: lost), and the number of shards searched there.

    `steps` are, by worker, the latest steps with attention on the host.
    """

    family: Family
    lanes: dict[str, LaneState]
    workers: list[tuple[WorkerRecord, bool]]
    shards: int = 0
    steps: Mapping[str, StepRecord] = MappingProxyType({})


class MeshSnapshot:
    """Reads every family at most once in FRESH_S, for any number of callers."""

    def __init__(self, bus: Bus, cards: Cards, partitions: int) -> None:
        self._bus, self._cards = bus, cards
        self._requests = request_families(partitions)
        self._lock = asyncio.Lock()
        self._read_at: float | None = None
        self._states: list[FamilyState] = []

    async def states(self) -> list[FamilyState]:
        """Return the state of every family, with the families of searches last; BusDown if Redis is away."""
        async with self._lock:
            now = self._bus.clock.monotonic()
            if self._read_at is None or now - self._read_at >= FRESH_S:
                await self._read()
                self._read_at = self._bus.clock.monotonic()
        return self._states

    async def _read(self) -> None:
        families = [*await self._cards.families(), *self._requests, SESSIONS]
        shards = Counter[Family]()
        for record in await Collections(self._bus).all():
            shards[self._bus.writes.search_family(record.id)] += record.shards
        every = (*families, *sorted(shards))
        self._states = await asyncio.gather(*(self._family(f, shards[f]) for f in every))

    async def _family(self, family: Family, shards: int) -> FamilyState:
        lanes, workers = await self._bus.lanes.states(family), await self._bus.workers.all(family)
        decoders = [record.worker for record, _ in workers if family.kind == "chat"]
        steps = await LatestSteps(self._bus).of(family, decoders)
        return FamilyState(family, lanes, workers, shards, steps)
