"""Which leased jobs run together next; pure, so it can be replayed and property-tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Sized(Protocol):
    """A job as the batch former sees it."""

    @property
    def items(self) -> int:
        """Texts it holds."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens it holds."""
        ...

    @property
    def alone(self) -> bool:
        """True if it must share no batch."""
        ...


class Limits(NamedTuple):
    """The largest batch; a single job may exceed it, two together may not."""

    items: int
    tokens: int


def next_batch(queue: Sequence[Sized], limits: Limits) -> list[int]:
    """Return the indices in `queue` (oldest first) of the jobs to run next.

    The oldest always runs, so nothing starves. A job marked alone runs alone. Younger jobs join while they fit,
    past ones that do not; but none joins past a job marked alone, whose turn is next.
    """
    if not queue:
        return []
    chosen = [0]
    if queue[0].alone:
        return chosen
    items, tokens = queue[0].items, queue[0].tokens
    for index in range(1, len(queue)):
        job = queue[index]
        if job.alone:
            break
        if items + job.items <= limits.items and tokens + job.tokens <= limits.tokens:
            chosen.append(index)
            items += job.items
            tokens += job.tokens
    return chosen


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
