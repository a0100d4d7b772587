"""How long an encoder's batches take, and what it may therefore hold: measured at the start, followed as it runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.cost.finish import margin
from common.cost.linear import Depth, LinearCost, Probe
from common.cost.online import Lateness, OnlineCost
from common.wire.registry import WorkerRecord
from engine.encoder.batching import BatchLimits

_BATCH_ITEMS = 256
_ALL = BatchLimits(1_000_000, 1_000_000_000)
# Before anything is known of how far predictions are off; and the most that is believed, as one hiccup of the machine
# must not close the door for long.
_LATE_PRIOR, _LATE_MOST = 0.1, 0.25  # of the objective
_SHARE_PRIOR, _SHARE_MOST = 0.25, 1.0  # of the prediction


class EncoderCapacity:
    """One worker's costs, largest batch and depth; `observe` every batch, `ended` tells how well its end was
    foreseen."""

    def __init__(
        self,
        probes: Sequence[Probe],
        *,
        slo_s: float,
        known: LinearCost | None = None,
        takes_all: bool = False,
    ) -> None:
        """Begin with what was probed, or with a cost that is known and stays.

        One that `takes_all` runs whatever waits as one batch, as depths in queries suppose.
        """
        self._online = OnlineCost(probes, fixed=known)
        self.slo_s = slo_s
        self.limits = _ALL if takes_all else BatchLimits(_BATCH_ITEMS, self.cost.batch_tokens())
        self.queries: int | None = None  # the depth that probes through the mesh have found
        self._late = Lateness(prior=_LATE_PRIOR * slo_s)
        self._late_share = Lateness(prior=_SHARE_PRIOR)

    @property
    def cost(self) -> LinearCost:
        """Seconds of a batch, as far as is known now."""
        return self._online.cost

    @property
    def depth(self) -> Depth:
        """The most this worker may hold, queued and running, whatever the mix."""
        return self.cost.depth(
            self.slo_s, batch_items=self.limits.items, batch_tokens=self.limits.tokens
        )

    @property
    def late(self) -> tuple[float, float]:
        """What ends may be later than predicted: seconds, and share of the prediction; the lesser holds."""
        return (
            min(self._late.value, _LATE_MOST * self.slo_s),
            min(self._late_share.value, _SHARE_MOST),
        )

    def seconds(self, items: int, tokens: int) -> float:
        """Predict a batch."""
        return self.cost.seconds(items, tokens)

    def surely(self, items: int, tokens: int) -> float:
        """Return the seconds after which a batch that begins now is over, with the margin that predictions need."""
        seconds = self.seconds(items, tokens)
        return seconds + margin(seconds, *self.late)

    def observe(self, items: int, tokens: int, seconds: float) -> float:
        """Learn from a batch that ran undisturbed; return measured over predicted seconds."""
        return self._online.observe(items, tokens, seconds)

    def ended(self, late_s: float, foreseen_s: float) -> None:
        """Note that a batch ended `late_s` later (or earlier) than the door had said `foreseen_s` before."""
        self._late.add(late_s)
        self._late_share.add(late_s / max(foreseen_s, 1e-3))

    def record(self, record: WorkerRecord) -> WorkerRecord:
        """Return the record with everything the door predicts by."""
        cost, depth, late = self.cost, self.depth, self.late
        return msgspec.structs.replace(
            record,
            depth_items=depth.items,
            depth_tokens=depth.tokens,
            depth_queries=cost.queries(self.slo_s) if self.queries is None else self.queries,
            alpha_items_s=cost.alpha_items_s,
            alpha_tokens_s=cost.alpha_tokens_s,
            beta_s=cost.beta_s,
            r2=self._online.r2,
            limit_items=self.limits.items,
            limit_tokens=self.limits.tokens,
            late_s=late[0],
            late_share=late[1],
            slo_s=self.slo_s,
        )
