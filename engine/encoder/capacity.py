"""The capacity of an encoder: seconds of its batches, its largest batch and its depth.

Costs are measured before the worker takes work, and corrected by every batch that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.clock import SYSTEM, Clock
from common.cost.finish import LEAST, margin
from common.cost.linear import Depth, LinearCost, Probe
from common.cost.online import Lateness, OnlineCost
from common.cost.slowdown import Slowness, slowdown
from engine.encoder.batching import BatchLimits
from engine.encoder.model import EncoderModel

_BATCH_ITEMS = 256
# What a batch costs beside its own seconds: threads that wait for the last part, and the event loop's turn after it.
_TURN_S = 0.003
_ALL = BatchLimits(1_000_000, 1_000_000_000)
# How late batches end: priors, which fade over _FADES batches, and upper bounds, since one hiccup of the machine must
# not make admission refuse work for long. Costs are measured while nothing else runs, and a first burst is admitted
# before any of its batches has ended; so the priors are the slowdown of a lane whose cores are shared.
_LATE_PRIOR, _LATE_MOST = 0.4, 0.6  # of the objective
_SHARE_PRIOR, _SHARE_MOST = 0.6, 1.5  # of the prediction
_FADES = 100
_SHORT = 0.25  # of the objective: the least prediction that lateness is divided by
# Batches timed at the start, as (texts, tokens of each); each runs _REPEATS times, or once if slower than _SLOW_S.
_SHAPES = ((1, 8), (1, 64), (8, 32), (8, 128), (32, 64))
_REPEATS = 4
_SLOW_S = 0.5


class EncoderCapacity:
    """One worker's costs, largest batch and depth; `ran` and `ended` learn from every batch."""

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        slo_s: float,
        known: LinearCost | None = None,
        takes_all: bool = False,
    ) -> None:
        """Begin with timed batches, or with a `known` cost, which never changes.

        A worker that `takes_all` runs all waiting jobs as one batch, as the model of depths in queries assumes.
        """
        self.online = OnlineCost(probes, fixed=known)
        self.slo_s = slo_s
        turned = self.cost._replace(beta_s=self.cost.beta_s + _TURN_S)
        self.limits = _ALL if takes_all else BatchLimits(_BATCH_ITEMS, turned.batch_tokens())
        self.queries: int | None = None  # the depth in queries, as found by probes through the mesh
        self.slowness = Slowness()
        self._late = Lateness(prior=_LATE_PRIOR * slo_s, fades=_FADES)
        self._late_share = Lateness(prior=_SHARE_PRIOR, fades=_FADES)

    @property
    def cost(self) -> LinearCost:
        """The cost model of a batch, as fitted so far."""
        return self.online.cost

    @property
    def depth(self) -> Depth:
        """The most items and tokens that this worker may hold, queued and running, for any mix of texts."""
        return self.cost.depth(
            self.slo_s, batch_items=self.limits.items, batch_tokens=self.limits.tokens
        )

    @property
    def late(self) -> tuple[float, float]:
        """The lateness to expect: in seconds, and beyond LEAST of the objective as a share of the prediction."""
        return (
            min(self._late.value, _LATE_MOST * self.slo_s),
            min(self._late_share.value, _SHARE_MOST),
        )

    def ran(self, items: int, tokens: int, seconds: float) -> float:
        """Learn from a batch that ran undisturbed; return measured / fitted seconds (1 if nothing was fitted)."""
        ratio = self.online.observe(items, tokens, seconds)
        if ratio > 0:
            self.slowness = self.slowness.after(ratio)
        return ratio

    def rested(self, seconds: float) -> None:
        """Record `seconds` without a batch: the speed of the last batches then tells less about the next one."""
        self.slowness = self.slowness.faded(seconds)

    def expected(self, items: int, tokens: int) -> float:
        """Return the seconds that a batch takes at the device's recent speed."""
        return slowdown(self.slowness) * self.cost.seconds(items, tokens)

    def surely(self, items: int, tokens: int) -> float:
        """Return the seconds within which a batch that begins now surely ends: prediction and margin."""
        seconds = self.expected(items, tokens)
        return seconds + margin(seconds, *self.late, LEAST * self.slo_s)

    def ended(self, late_s: float, foreseen_s: float) -> None:
        """Record that a batch ended `late_s` later (negative: earlier) than admission predicted `foreseen_s` ahead."""
        self._late.add(late_s)
        beyond_s = late_s - LEAST * self.slo_s
        self._late_share.add(beyond_s / max(foreseen_s, _SHORT * self.slo_s, 1e-3))


def calibrate(
    model: EncoderModel, slo_s: float, *, takes_all: bool = False, clock: Clock = SYSTEM
) -> EncoderCapacity:
    """Time batches of a few shapes, which also warms the model; a model of known cost is not timed."""
    known = model.known_cost
    probes = [] if known is not None else [_probe(model, *shape, clock) for shape in _SHAPES]
    return EncoderCapacity(probes, slo_s=slo_s, known=known, takes_all=takes_all)


def _probe(model: EncoderModel, items: int, length: int, clock: Clock) -> Probe:
    length = min(length, model.max_tokens)
    # Ids that every vocabulary has; a dense model takes the same time for any ids.
    rows = [[2 + (i * 31 + j * 7) % 97 for j in range(length)] for i in range(items)]
    seconds = []
    for turn in range(_REPEATS + 1):
        started_s = clock.perf_s()
        if model.reranks:
            model.score(rows, [])
        else:
            model.encode(rows)
        took_s = clock.perf_s() - started_s
        if turn or took_s > _SLOW_S:
            seconds.append(took_s)
        if took_s > _SLOW_S:
            break
    # The least: other processes that start beside this worker only add time; later drift is learned from batches.
    return Probe(items, items * length, min(seconds))
