"""The costs on which a deployment's plan is based, compared with the workers' present costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from common.cost.linear import LinearCost
from common.errors import ConfigError
from common.ids import Family
from common.wire.registry import WorkerRecord
from services.router import metrics

DRIFT = 1.5  # a ratio of present to planned seconds beyond this, or below 1 / this, is drift
KINDS = ("embed", "rerank", "chat", "search")
_PART = re.compile(r"([a-z]+):([0-9]{1,9}):([0-9]{1,9})=([0-9.]+(?:e[+-]?[0-9]{1,2})?)")


class PlannedBatch(NamedTuple):
    """A batch of a kind of work, its items and tokens, and its seconds according to the plan."""

    kind: str
    items: int
    tokens: int
    seconds: float


def parse_planned_costs(text: str) -> list[PlannedBatch]:
    """Return the batches of a text, `kind:items:tokens=seconds` with commas between; ConfigError for another text."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _PART.fullmatch(part)
        seconds = float(match[4]) if match and match[4].count(".") < 2 else 0.0
        if not match or match[1] not in KINDS or not 0 < seconds < math.inf:
            raise ConfigError(
                f"SPILLWAY_PLANNED_COSTS holds {part[:80]!r}; expected kind:items:tokens=seconds, "
                f"the kind one of {', '.join(KINDS)}, such as chat:1:480=0.2"
            )
        found.append(PlannedBatch(match[1], int(match[2]), int(match[3]), seconds))
    return found


class PlannedCosts:
    """Compares the living workers' cost models with the plan's costs, in one gauge per kind of work."""

    def __init__(self, text: str) -> None:
        """`text` is the value of SPILLWAY_PLANNED_COSTS; ConfigError if it cannot be parsed."""
        self._batches = parse_planned_costs(text)
        self._live: dict[str, dict[str, list[LinearCost]]] = {
            each.kind: {} for each in self._batches
        }

    def note(self, family: Family, workers: Iterable[WorkerRecord]) -> None:
        """Record the present cost models of a family's workers, and set the gauge of the family's kind."""
        if (families := self._live.get(family.kind)) is None:
            return
        each = [LinearCost(w.beta_s, w.alpha_items_s, w.alpha_tokens_s) for w in workers]
        families[str(family)] = [cost for cost in each if any(cost)]
        found = [row for row in self.compare() if row["kind"] == family.kind]
        ratios = [row["ratio"] for row in found if row["ratio"] is not None]
        gauge = metrics.PLANNED_COST_RATIO.labels(family.kind)
        gauge.set(max(ratios, key=lambda ratio: abs(math.log(ratio)), default=math.nan))

    def compare(self) -> list[dict[str, Any]]:
        """Return the planned and the present seconds of each planned batch, the latter as the mean over its workers.

        `live_s` and `ratio` are None for a kind of work without a worker that has a cost model.
        """
        return [self._compared(batch) for batch in self._batches]

    def _compared(self, batch: PlannedBatch) -> dict[str, Any]:
        costs = [cost for each in self._live[batch.kind].values() for cost in each]
        live_s = ratio = None
        if costs:
            live_s = sum(cost.seconds(batch.items, batch.tokens) for cost in costs) / len(costs)
            ratio = live_s / batch.seconds
        drifted = ratio is not None and not 1 / DRIFT <= ratio <= DRIFT
        return {**batch._asdict(), "live_s": live_s, "ratio": ratio, "drifted": drifted}
