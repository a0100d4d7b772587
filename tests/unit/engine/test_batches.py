"""Properties of the batch former and of the order of texts."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from engine.encoder.batching import BatchLimits, length_order, next_batch


class Piece(NamedTuple):
    """A job as the former sees it."""

    items: int
    tokens: int
    alone: bool
    batch: int = 0
    due_ms: int = 0


PIECES = st.builds(
    Piece, st.integers(1, 32), st.integers(1, 9000), st.booleans() | st.just(value=False)
)
LIMITS = st.builds(BatchLimits, st.integers(1, 256), st.integers(1, 8192))


@given(st.lists(PIECES, max_size=40), LIMITS)
def test_everything_runs_once_and_within_limits(queue: list[Piece], limits: BatchLimits) -> None:
    """Every job runs exactly once; no batch of several jobs exceeds a limit; alone means alone."""
    left, ran = list(enumerate(queue)), []
    while left:
        chosen = next_batch([piece for _, piece in left], limits)
        batch = [left[index][1] for index in chosen]
        assert chosen == sorted(set(chosen))
        assert chosen[0] == 0
        if len(batch) > 1:
            assert sum(piece.items for piece in batch) <= limits.items
            assert sum(piece.tokens for piece in batch) <= limits.tokens
            assert not any(piece.alone for piece in batch)
        ran += [left[index][0] for index in chosen]
        left = [entry for index, entry in enumerate(left) if index not in chosen]
    assert sorted(ran) == list(range(len(queue)))


@given(st.lists(PIECES, min_size=1, max_size=40), LIMITS)
def test_the_oldest_waits_for_nobody(queue: list[Piece], limits: BatchLimits) -> None:
    """A job starts after at most as many batches as jobs were queued before it."""
    left, batches = list(enumerate(queue)), 0
    while left:
        oldest = left[0][0]
        assert batches <= oldest
        chosen = next_batch([piece for _, piece in left], limits)
        left = [entry for index, entry in enumerate(left) if index not in chosen]
        batches += 1


PLANNED = st.builds(
    Piece,
    st.integers(1, 8),
    st.integers(1, 500),
    st.just(value=False),
    st.integers(0, 4),
    st.integers(0, 5000),
)


@given(st.lists(PLANNED, min_size=1, max_size=30), LIMITS, st.floats(0.1, 2))
def test_planned_batches(queue: list[Piece], limits: BatchLimits, ms_a_token: float) -> None:
    """Of the oldest's batch all that fit run; later batches join whole, in order, and make nobody late."""
    chosen = next_batch(queue, limits, lambda _items, tokens: ms_a_token * tokens)
    batch, mine = [queue[index] for index in chosen], queue[0].batch
    later = [n for n in dict.fromkeys(job.batch for job in queue) if n not in (0, mine)]
    joined = [n for n in later if any(job.batch == n for job in batch)]
    own = [job for job in batch if job.batch == mine]

    assert joined == later[: len(joined)]
    assert all(job in batch for job in queue if job.batch in joined)
    if joined:
        assert ms_a_token * sum(job.tokens for job in batch) <= min(job.due_ms for job in batch)
    left = [index for index, job in enumerate(queue) if job.batch == mine and index not in chosen]
    for index in left:
        job = queue[index]
        assert (
            sum(other.items for other in own) + job.items > limits.items
            or sum(other.tokens for other in own) + job.tokens > limits.tokens
            or any(other.batch != mine for other in batch)
        )


def test_empty_queue() -> None:
    """Nothing queued, nothing chosen."""
    assert next_batch([], BatchLimits(1, 1)) == []


@given(st.lists(st.integers(1, 512), max_size=80), st.integers(1, 4096))
def test_texts_are_sorted_and_bounded(lengths: list[int], limit: int) -> None:
    """Every text is in one micro-batch, in order of length, and only a single long text exceeds the limit."""
    batches = length_order(lengths, limit)
    flat = [index for batch in batches for index in batch]

    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths)
    assert all(
        len(batch) == 1 or sum(lengths[index] for index in batch) <= limit for batch in batches
    )
