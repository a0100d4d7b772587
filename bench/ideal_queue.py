"""The wait at a device that nothing delays: what a request waits there is the load's, not the product's."""

from __future__ import annotations

import math
from collections.abc import Sequence


def waits(arrivals_s: Sequence[float], service_s: float) -> list[float]:
    """Return the seconds that each arrival waits for a device that takes, whenever it is free, all who wait.

    Arrivals rise; a batch of any size takes `service_s` seconds, in which nobody is taken.
    """
    found: list[float] = []
    ends_s, someone_waits = -math.inf, False  # the batch that was taken last
    for at_s in arrivals_s:
        if someone_waits and at_s >= ends_s:
            ends_s, someone_waits = ends_s + service_s, False
        if at_s >= ends_s:
            found.append(0.0)
            ends_s = at_s + service_s
        else:
            found.append(ends_s - at_s)
            someone_waits = True
    return found
