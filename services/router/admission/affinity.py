"""Which worker a turn should go to: the one that holds most of its pages, if there is a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.bus import Bus
from common.ids import Family
from common.pages.identity import PAGE, PageId
from common.registry.cache_directory import CacheDirectory
from common.wire.registry import WorkerRecord


class Preference(NamedTuple):
    """A worker, and the seconds that computing anew what it holds of a prompt would take; or nobody."""

    worker: str | None = None
    value_s: float = 0.0


NOBODY = Preference()


def choose(tokens: Mapping[str, int], workers: Mapping[str, WorkerRecord], most: int) -> Preference:
    """Return the worker whose tokens of a prompt of `most` are worth most, by its own published cost.

    Nobody, where no worker that takes work holds any, or there is only one to choose from.
    """
    takes = {name: w for name, w in workers.items() if not (w.draining or w.closed)}
    if len(takes) < 2:
        return NOBODY
    worth = [
        Preference(name, min(held, most) * takes[name].alpha_tokens_s)
        for name, held in sorted(tokens.items())
        if name in takes and held > 0
    ]
    return max(worth, key=lambda each: each.value_s, default=NOBODY)


async def preferred(
    bus: Bus, family: Family, session: str, marks: Sequence[PageId], most: int
) -> Preference:
    """Return who should have a prompt of `most` tokens: its session's holder, else who holds most of its prefix.

    `marks` are every 8th of its page ids. What was published may be over: the door asks who lives. Raises BusDown.
    """
    workers = await bus.workers.registered(family) if session or marks else {}
    if len(workers) < 2:
        return NOBODY
    held = await CacheDirectory(bus).held(session) if session else None
    if held is not None:
        tokens = {held.worker: held.device_tokens + held.host_tokens}
        if (found := choose(tokens, workers, most)) != NOBODY:
            return found
    pages = await CacheDirectory(bus).marked(family, marks, list(workers))
    return choose({worker: count * PAGE for worker, count in pages.items()}, workers, most)
