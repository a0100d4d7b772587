"""Batches of encode jobs: taken off a queue, and recorded in metrics once they ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.encoder.executor import EncodeResult
from services.adapters.encode.job import EncodeJob
from services.adapters.metrics import LaneMetrics


class Taken(NamedTuple):
    """What became of a queue: the next batch, the jobs that wait on, and the jobs whose deadline has passed."""

    batch: list[EncodeJob]
    waiting: deque[EncodeJob]
    expired: list[EncodeJob]


def take_batch(
    queue: Iterable[EncodeJob],
    choose: Callable[[Sequence[EncodeJob]], Iterable[int]],
    *,
    generation: int,
    now_ms: float,
) -> Taken:
    """Take a batch off a queue: `choose` returns the indices of its jobs among those that can still be computed.

    Jobs of another `generation` have lost their leases, and are dropped.
    """
    held = [job for job in queue if job.generation == generation]
    expired = [job for job in held if job.lease.deadline_ms <= now_ms]
    fresh = [job for job in held if job.lease.deadline_ms > now_ms]
    chosen = set(choose(fresh))
    batch = [job for index, job in enumerate(fresh) if index in chosen]
    waiting = deque(job for index, job in enumerate(fresh) if index not in chosen)
    return Taken(batch, waiting, expired)


def record_batch(metrics: LaneMetrics, items: int, tokens: int, ran: EncodeResult) -> None:
    """Count a batch that ran, its texts and tokens, and the seconds that the device took."""
    metrics.batch_size.observe(items)
    metrics.batch_tokens.observe(tokens)
    metrics.input.inc(tokens)
    metrics.step.observe(ran.seconds)
    metrics.isolated.inc(int(ran.isolated))
