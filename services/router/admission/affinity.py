"""Affinity: the worker whose own lane a job should take, since it holds the prompt's pages or is the only worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.bus import Bus
from common.ids import Family
from common.pages.identity import PAGE
from common.registry.cache_directory import CacheDirectory
from common.wire.registry import WorkerRecord
from services.router.admission.job_spec import Prompt


class Preference(NamedTuple):
    """A worker, or None, and the seconds that the worker's pages of a prompt save, since they need no recomputing."""

    worker: str | None = None
    value_s: float = 0.0


NOBODY = Preference()
_ALWAYS_S = 3600.0


def choose(tokens: Mapping[str, int], workers: Mapping[str, WorkerRecord], most: int) -> Preference:
    """Return the worker whose pages of a prompt save the most seconds, by the cost that each worker has published.

    `tokens` maps each worker to the number of the prompt's `most` tokens that it holds. NOBODY if no worker that takes
    work holds any, or only one worker takes work.
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


def reads_first(classes: Sequence[str], workers: Mapping[str, WorkerRecord]) -> Preference:
    """Return the only worker of the first class that has workers: in its own lane a question passes the shared lane.

    NOBODY if several workers share the class: a question in one worker's lane would wait while another is idle.
    """
    for cls in classes:
        serving = [name for name, worker in workers.items() if cls in worker.classes]
        if serving:
            return Preference(serving[0], _ALWAYS_S) if len(serving) == 1 else NOBODY
    return NOBODY


async def preferred(bus: Bus, family: Family, classes: Sequence[str], prompt: Prompt) -> Preference:
    """Return the worker that holds the prompt's session, else the worker that holds most of the prompt's prefix.

    For the question of a search, return the result of `reads_first`. Published records may be out of date: admission
    checks which workers live. Raises BusDown.
    """
    if prompt.question:
        return reads_first(classes, await bus.workers.registered(family))
    workers = await bus.workers.registered(family) if prompt.session or prompt.marks else {}
    if len(workers) < 2:
        return NOBODY
    held = await CacheDirectory(bus).held(prompt.session) if prompt.session else None
    if held is not None:
        tokens = {held.worker: held.device_tokens + held.host_tokens}
        if (found := choose(tokens, workers, prompt.tokens)) != NOBODY:
            return found
    pages = await CacheDirectory(bus).marked(family, prompt.marks, list(workers))
    return choose({worker: n * PAGE for worker, n in pages.items()}, workers, prompt.tokens)
