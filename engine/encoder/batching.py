"""Batches: which waiting jobs run together next, and how their texts form micro-batches; pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol


class WaitingJob(Protocol):
    """A waiting job: the properties on which batches depend."""

    @property
    def items(self) -> int:
        """The job's texts."""

    @property
    def tokens(self) -> int:
        """The job's tokens."""

    @property
    def alone(self) -> bool:
        """True if the job must share no batch."""

    @property
    def batch(self) -> int:
        """The batch that admission planned the job in; 0: in none."""

    @property
    def due_ms(self) -> int:
        """When the job should end, in milliseconds since the epoch."""


class BatchLimits(NamedTuple):
    """The largest batch; a single job may exceed it, two together may not."""

    items: int
    tokens: int


def _at_once(_items: int, _tokens: int) -> float:
    """Return an end before every due time, so that due times exclude no job."""
    return -math.inf


def next_batch(
    queue: Sequence[WaitingJob], limits: BatchLimits, end_ms: Callable[[int, int], float] = _at_once
) -> list[int]:
    """Return the indices in `queue` (oldest first) of the jobs to run next.

    The oldest job always runs, so that no job starves, and with it the jobs that admission planned into its batch. A
    job marked alone runs alone. Younger jobs join while they fit, past jobs that do not fit; but none joins past a job
    marked alone, whose turn is next. A later planned batch joins as a whole, if `end_ms` (when a batch of so many items
    and tokens would surely be over) is no later than the due time of any job in the batch.
    """
    if not queue:
        return []
    first = queue[0]
    chosen, items, tokens, due_ms = [0], first.items, first.tokens, first.due_ms
    if first.alone:
        return chosen
    for group in _groups(queue):
        jobs = [queue[index] for index in group]
        more_items = items + sum(job.items for job in jobs)
        more_tokens = tokens + sum(job.tokens for job in jobs)
        planned_apart = jobs[0].batch != first.batch
        fits = more_items <= limits.items and more_tokens <= limits.tokens
        earliest_ms = min(due_ms, *(job.due_ms for job in jobs))
        in_time = not planned_apart or end_ms(more_items, more_tokens) <= earliest_ms
        if fits and in_time:
            chosen += group
            items, tokens, due_ms = more_items, more_tokens, earliest_ms
        elif jobs[0].batch not in (0, first.batch):
            break  # batches planned later stay later
    return sorted(chosen)


def _groups(queue: Sequence[WaitingJob]) -> Iterator[list[int]]:
    """Yield the groups that may join the oldest job: each job of its batch, each unplanned job, later batches whole."""
    later: dict[int, list[int]] = {}
    for index in range(1, len(queue)):
        job = queue[index]
        if job.alone:
            break
        if job.batch in (0, queue[0].batch):
            yield [index]
        else:
            later.setdefault(job.batch, []).append(index)
    yield from later.values()


def length_order(lengths: Sequence[int], limit_tokens: int) -> list[list[int]]:
    """Split texts into micro-batches of at most `limit_tokens`, shortest first, equal lengths together.

    Returns indices; every text appears once; a text longer than the limit is a micro-batch of its own.
    """
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or tokens + lengths[index] > limit_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return batches
