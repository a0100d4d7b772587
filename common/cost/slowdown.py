"""The slowdown of a machine: the factor by which batches take longer than their fitted costs, learned in a few batches.

The lanes of one machine share its cores with each other and with the rest of the mesh, so they are slow at the same
time. A fitted cost follows the device over many batches; this factor follows it within a minute. The script `admit`
computes the same in Lua (bus/lua/lanes.lua).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

HALF_S = 2.0  # seconds in which the weight of evidence halves
_MEMORY = 0.7  # the factor on a batch's weight for each later batch
_STEP = math.log(2.0)  # the most by which one batch may differ from the mean, in logarithms
_MOST = math.log(8.0)
# The weight, in batches of the lane's own, of all other lanes' batches, and of the fitted cost itself.
OTHERS, FITTED = 1.0, 0.5


class Slowness(NamedTuple):
    """The slowness of one worker's latest batches: mean logarithm of measured / fitted seconds, and its weight.

    The weight is a number of batches, in which older batches count less.
    """

    log: float = 0.0
    weight: float = 0.0

    def after(self, ratio: float) -> Slowness:
        """Return the slowness after one more batch, which took `ratio` (above 0) times its fitted seconds."""
        seen = min(max(math.log(ratio), -_MOST), _MOST)
        seen = min(max(seen, self.log - _STEP), self.log + _STEP)
        kept = _MEMORY * self.weight
        return Slowness((kept * self.log + seen) / (kept + 1), kept + 1)

    def faded(self, seconds: float) -> Slowness:
        """Return the slowness after `seconds` without a batch, which lower its weight."""
        return self._replace(weight=self.weight * 0.5 ** (max(0.0, seconds) / HALF_S))


def slowdown(own: Slowness, others: Iterable[Slowness] = ()) -> float:
    """Return the factor by which a worker's batches take longer than fitted; 1 without recent batches.

    All other workers of the machine together weigh at most as much as one batch of the worker's own.
    """
    weight, log = own.weight, own.weight * own.log
    rest = list(others)
    theirs = sum(each.weight for each in rest)
    if theirs > 0:
        taken = min(OTHERS, theirs)
        log += taken * sum(each.weight * each.log for each in rest) / theirs
        weight += taken
    return math.exp(log / (weight + FITTED))
