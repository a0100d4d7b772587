"""A machine's slowdown: how many times longer batches take than their costs say, learned within a few batches.

Lanes of one machine share its cores, and the rest of the mesh takes some of them too, so all lanes are slow together. A
fit follows the device over many batches; this factor follows the minute. The script `admit` computes the same in Lua
(bus/lua/lanes.lua).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

HALF_S = 2.0  # after so many seconds evidence weighs half
_MEMORY = 0.7  # a batch's weight after each later one
_STEP = math.log(2.0)  # one batch is at most so far from what was known, in logarithms
_MOST = math.log(8.0)
# So much do the other lanes' batches weigh against a lane's own, and so much the fitted cost itself, in batches.
OTHERS, FITTED = 1.0, 0.5


class Slowness(NamedTuple):
    """What the latest batches of one worker say: the mean logarithm of measured over fitted seconds, and its weight.

    The weight is a count of batches, of which older ones weigh less.
    """

    log: float = 0.0
    weight: float = 0.0

    def after(self, ratio: float) -> Slowness:
        """Return what is known after one more batch, which took `ratio` (above 0) times its fitted seconds."""
        seen = min(max(math.log(ratio), -_MOST), _MOST)
        seen = min(max(seen, self.log - _STEP), self.log + _STEP)
        kept = _MEMORY * self.weight
        return Slowness((kept * self.log + seen) / (kept + 1), kept + 1)

    def faded(self, seconds: float) -> Slowness:
        """Return what is still known after `seconds` without a batch."""
        return self._replace(weight=self.weight * 0.5 ** (max(0.0, seconds) / HALF_S))


def slowdown(own: Slowness, others: Iterable[Slowness] = ()) -> float:
    """Return the factor by which a worker's batches take longer than fitted: 1 where no batch was run lately.

    The other workers of the machine decide together as much as one batch of the worker's own.
    """
    weight, log = own.weight, own.weight * own.log
    rest = list(others)
    theirs = sum(each.weight for each in rest)
    if theirs > 0:
        taken = min(OTHERS, theirs)
        log += taken * sum(each.weight * each.log for each in rest) / theirs
        weight += taken
    return math.exp(log / (weight + FITTED))
