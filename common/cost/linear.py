"""The linear cost model of batches, fitted to probes, and the depth that a deadline allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from common.cost.moments import Moments

PARCEL_ITEMS = 32
PARCEL_TOKENS = 8192
# Depth must not limit any mix of texts: items are computed for texts as short as this, tokens for texts as long.
SHORT_TEXT_TOKENS = 8
LONG_TEXT_TOKENS = 512
TYPICAL_TEXT_TOKENS = 64
QUERY_TOKENS = 75  # the paper's query (section V)


class Probe(NamedTuple):
    """One measured batch."""

    items: int
    tokens: int
    seconds: float


class Depth(NamedTuple):
    """Items and tokens that a worker may hold, queued and running."""

    items: int
    tokens: int


class LinearCost(NamedTuple):
    """Seconds of a batch = beta_s + alpha_items_s * items + alpha_tokens_s * tokens; none is negative."""

    beta_s: float
    alpha_items_s: float
    alpha_tokens_s: float

    def seconds(self, items: int, tokens: int) -> float:
        """Predict the seconds of one batch."""
        return self.beta_s + self.alpha_items_s * items + self.alpha_tokens_s * tokens

    def scaled(self, factor: float) -> LinearCost:
        """Return the model of a device that is `factor` times slower."""
        return LinearCost(*(factor * part for part in self))

    def batch_tokens(self, overhead: float = 0.05) -> int:
        """Return the tokens of a batch whose fixed cost is a share of at most `overhead`, within [1024, 8192].

        Larger batches would be hardly faster per token, and all their jobs would wait for the last one.
        """
        marginal = self.alpha_tokens_s + self.alpha_items_s / TYPICAL_TEXT_TOKENS
        if marginal <= 0:
            return PARCEL_TOKENS
        return min(PARCEL_TOKENS, max(1024, int(self.beta_s / overhead / marginal)))

    def depth(self, slo_s: float, *, batch_items: int, batch_tokens: int) -> Depth:
        """Return the most items and tokens that end within `slo_s` in batches of at most the given size.

        Both numbers hold for the lightest mix of texts; admission predicts whether a given mix ends in time. The depth
        is at least one full parcel, since a worker must be able to hold a parcel to serve it.
        """
        left_s = max(0.0, slo_s - self.beta_s)
        per_token = self.alpha_tokens_s + self.alpha_items_s / LONG_TEXT_TOKENS
        per_token += self.beta_s / batch_tokens
        per_item = self.alpha_items_s + self.alpha_tokens_s * SHORT_TEXT_TOKENS
        per_item += self.beta_s / batch_items
        return Depth(
            max(PARCEL_ITEMS, _whole(left_s, per_item)),
            max(PARCEL_TOKENS, _whole(left_s, per_token)),
        )

    def queries(self, slo_s: float, spare_s: float = 0.0) -> int:
        """Return how many queries of QUERY_TOKENS fit into one batch within `slo_s`; 0 if one query would miss it.

        With `spare_s` 0 this is the closed-loop depth D_c = floor((slo - beta) / alpha) (WindVE, equations 7 to 11 with
        12). The open-loop depth needs a `spare_s` of the hops, a margin, and another beta, since a job may arrive just
        after a batch began.
        """
        alpha_s = self.alpha_items_s + QUERY_TOKENS * self.alpha_tokens_s
        return LinearCost(self.beta_s, alpha_s, 0.0).queries_of(slo_s - spare_s)

    def queries_of(self, slo_s: float) -> int:
        """Return how many items fit into one batch within `slo_s`; 0 if one item would miss it."""
        left_s = slo_s - self.beta_s
        return 0 if self.alpha_items_s > left_s else _whole(left_s, self.alpha_items_s)


def _whole(total: float, each: float) -> int:
    limit = 10_000_000
    return limit if each <= total / limit else math.floor(total / each + 1e-9)


def fit(probes: Sequence[Probe]) -> LinearCost:
    """Fit the non-negative model with the least squared relative error; ValueError without probes."""
    if not probes or any(not probe.seconds > 0 for probe in probes):
        raise ValueError("fit: expected at least one probe, each with seconds above 0")
    moments = Moments(2)
    for probe in probes:
        moments.add((probe.items, probe.tokens), probe.seconds)
    return LinearCost(*moments.solve())
