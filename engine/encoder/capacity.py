"""The capacity of an encoder: seconds of its batches, its largest batch and its depth.

Costs are measured before the worker takes work, and followed as its batches run.
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
_ALL = BatchLimits(1_000_000, 1_000_000_000)
# Before anything is known of how far predictions are off, for so many batches; and the most that is believed, as one
# hiccup of the machine must not close the door for long. Costs were fitted while nothing else ran, and a first burst is
# admitted before a batch of it has ended, so the priors are what sharing its cores costs a lane.
_LATE_PRIOR, _LATE_MOST = 0.4, 0.6  # of the objective
_SHARE_PRIOR, _SHARE_MOST = 0.6, 1.5  # of the prediction
_FADES = 100
_SHORT = 0.25  # of the objective: a shorter wait says nothing of shares
# What is timed at the start: (texts, tokens each), so often; a batch slower than this once only.
_SHAPES = ((1, 8), (1, 64), (8, 32), (8, 128), (32, 64))
_REPEATS = 4
_SLOW_S = 0.5


class EncoderCapacity:
    """One worker's costs, largest batch and depth: `observe` every batch, and when it had been predicted to end."""

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        slo_s: float,
        known: LinearCost | None = None,
        takes_all: bool = False,
    ) -> None:
        """Begin with timed batches, or with a `known` cost, which stays.

        A worker that `takes_all` runs all that waits as one batch, as depths in queries suppose.
        """
        self.online = OnlineCost(probes, fixed=known)
        self.slo_s = slo_s
        self.limits = _ALL if takes_all else BatchLimits(_BATCH_ITEMS, self.cost.batch_tokens())
        self.queries: int | None = None  # the depth in queries that probes through the mesh found
        self.slowness = Slowness()
        self._late = Lateness(prior=_LATE_PRIOR * slo_s, fades=_FADES)
        self._late_share = Lateness(prior=_SHARE_PRIOR, fades=_FADES)

    @property
    def cost(self) -> LinearCost:
        """The cost model of a batch, as it is known now."""
        return self.online.cost

    @property
    def depth(self) -> Depth:
        """The most that this worker may hold, queued and running, whatever the mix."""
        return self.cost.depth(
            self.slo_s, batch_items=self.limits.items, batch_tokens=self.limits.tokens
        )

    @property
    def late(self) -> tuple[float, float]:
        """How much later than predicted a batch may end: in seconds, and as a share beyond LEAST of the objective."""
        return (
            min(self._late.value, _LATE_MOST * self.slo_s),
            min(self._late_share.value, _SHARE_MOST),
        )

    def ran(self, items: int, tokens: int, seconds: float) -> float:
        """Learn from a batch that ran undisturbed; return measured over fitted seconds (1 if none were)."""
        ratio = self.online.observe(items, tokens, seconds)
        if ratio > 0:
            self.slowness = self.slowness.after(ratio)
        return ratio

    def rested(self, seconds: float) -> None:
        """Note that no batch ran for so long: the speed of the last ones says less of the next."""
        self.slowness = self.slowness.faded(seconds)

    def expected(self, items: int, tokens: int) -> float:
        """Return the seconds that a batch takes while the device is as slow as it was lately."""
        return slowdown(self.slowness) * self.cost.seconds(items, tokens)

    def surely(self, items: int, tokens: int) -> float:
        """Return the seconds after which a batch that begins now is over, with the margin that predictions need."""
        seconds = self.expected(items, tokens)
        return seconds + margin(seconds, *self.late, LEAST * self.slo_s)

    def ended(self, late_s: float, foreseen_s: float) -> None:
        """Note that a batch ended `late_s` later (or earlier) than the door had said `foreseen_s` before."""
        self._late.add(late_s)
        beyond_s = late_s - LEAST * self.slo_s
        self._late_share.add(beyond_s / max(foreseen_s, _SHORT * self.slo_s, 1e-3))


def calibrate(
    model: EncoderModel, slo_s: float, *, takes_all: bool = False, clock: Clock = SYSTEM
) -> EncoderCapacity:
    """Time a few batch shapes, which warms the model too; a model whose cost is known is not timed."""
    known = model.known_cost
    probes = [] if known is not None else [_probe(model, *shape, clock) for shape in _SHAPES]
    return EncoderCapacity(probes, slo_s=slo_s, known=known, takes_all=takes_all)


def _probe(model: EncoderModel, items: int, length: int, clock: Clock) -> Probe:
    length = min(length, model.max_tokens)
    # Ids every vocabulary has; which ones does not matter to the time a dense model takes.
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
    # The best of them: whatever else starts beside this worker is not the device's cost, and drift is followed later.
    return Probe(items, items * length, min(seconds))
