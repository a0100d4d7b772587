"""Gauges of the lanes, workers and dead letters of families, and the depths that bound parcels."""

from __future__ import annotations

from collections.abc import Sequence

from common.bus import Bus, LaneState
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from services.router import metrics
from services.router.admission.controller import AdmissionController
from services.router.admission.policy import CLASSES_OF, SESSIONS, request_families
from services.router.mesh.lane_depths import LaneDepths
from services.router.mesh.planned_costs import PlannedCosts

USED_S = 60.0  # a family is watched for this long after its last job
MOST_FAMILIES = 64
EMPTY = LaneState(0, 0, 0, 0, 0.0, 0)


class LaneMonitor:
    """Reads families in rounds: `read` each family, then `end_round` removes the gauges of all others."""

    def __init__(
        self,
        bus: Bus,
        admission: AdmissionController,
        depths: LaneDepths,
        planned: PlannedCosts,
        partitions: int,
    ) -> None:
        self._bus, self._admission, self._depths = bus, admission, depths
        self._planned = planned
        self._requests = request_families(partitions)
        self._dead: set[Family] | None = (
            None  # families with dead letters; None before the first look
        )
        self._lanes: set[str] = set()
        self._families: set[Family] = set()
        self._read_lanes: set[str] = set()
        self._read_families: set[Family] = set()

    async def others(self, models: Sequence[Family]) -> list[Family]:
        """Return the families to read besides the models': requests, sessions, families in use or with dead letters."""
        if self._dead is None:
            self._dead = set(await DeadLetters(self._bus).families())
        used = [f for f in self._admission.used_within(USED_S) if f not in models][:MOST_FAMILIES]
        return sorted({*self._requests, SESSIONS, *used, *self._dead} - set(models))

    async def read(self, family: Family) -> None:
        """Read a family's lanes, workers and dead letters, and set their gauges."""
        lanes = await self._bus.lanes.states(family)
        workers = [w for w in await self._bus.workers.living(family) if not w.draining]
        metrics.WORKERS.labels(str(family)).set(len(workers))
        self._planned.note(family, workers)
        letters = await DeadLetters(self._bus).count(family)
        metrics.DEAD_LETTERS.labels(str(family)).set(letters)
        if self._dead is not None:
            (self._dead.add if letters else self._dead.discard)(family)
        shared = {cls: lane for cls, lane in lanes.items() if not cls.startswith("w.")}
        self._depths.note(
            family.name,
            [(one.depth_items, one.depth_tokens) for one in shared.values() if one.depth_items],
        )
        expected = dict.fromkeys(CLASSES_OF.get(family.kind, ()), EMPTY)
        for cls, lane in (expected | shared).items():
            self._read_lanes.add(f"{family}:{cls}")
            _set_gauges(f"{family}:{cls}", lane)
        self._read_families.add(family)

    def end_round(self) -> None:
        """Remove the gauges of lanes and families that were read in the previous round but not in this round."""
        for lane in self._lanes - self._read_lanes:
            _remove_gauges(lane)
        for family in self._families - self._read_families:
            metrics.WORKERS.remove(str(family))
            metrics.DEAD_LETTERS.remove(str(family))
        self._lanes, self._families = self._read_lanes, self._read_families
        self._read_lanes, self._read_families = set(), set()


def _set_gauges(name: str, lane: LaneState) -> None:
    metrics.DEPTH.labels(name, "items").set(lane.depth_items)
    metrics.DEPTH.labels(name, "tokens").set(lane.depth_tokens)
    metrics.USED.labels(name, "items").set(lane.items)
    metrics.USED.labels(name, "tokens").set(lane.tokens)
    metrics.OLDEST.labels(name).set(lane.oldest_age_s)
    metrics.PENDING.labels(name).set(lane.pending)
    metrics.QUEUED.labels(name).set(lane.queued)
    metrics.STRANDED.labels(name).set(lane.stranded)
    metrics.ADMITTED.labels(name)  # a lane without jobs so far counts 0


def _remove_gauges(name: str) -> None:
    for gauge in (metrics.DEPTH, metrics.USED):
        for unit in ("items", "tokens"):
            gauge.remove(name, unit)
    for gauge in (metrics.OLDEST, metrics.PENDING, metrics.QUEUED, metrics.STRANDED):
        gauge.remove(name)
