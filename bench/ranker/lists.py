"""Lists to train and judge a cross-encoder on: a question, the passage that answers it, and wrong ones like it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

NEGATIVES = 7


class RankedList(NamedTuple):
    """A question, and the numbers of its passages: the one that answers it first, then the wrong ones."""

    question: str
    passages: tuple[int, ...]


def wrong(
    nearest: Sequence[int],
    page_of: Sequence[int],
    right: int,
    alike: Sequence[str],
    draw: random.Random,
) -> tuple[int, ...]:
    """Return NEGATIVES of the passages that a search found nearest, without any of the right passage's own page.

    A passage whose sentence in `alike` is the right one's answers the question as well, and is left out, too. The
    nearer half is drawn more often; fewer come back where too few were found.
    """
    usable = [at for at in nearest if page_of[at] != page_of[right] and alike[at] != alike[right]]
    near, far = usable[:NEGATIVES], usable[NEGATIVES:]
    draw.shuffle(far)
    kept = draw.sample(near, min(len(near), NEGATIVES - 2))
    rest = [*far, *(at for at in near if at not in kept)]
    return (*kept, *rest[: NEGATIVES - len(kept)])


def held_out(page: int, seed: int) -> bool:
    """Return whether a page is one of the tenth that is not trained on, but judged."""
    return random.Random(f"{seed} {page}").random() < 0.1


def reciprocal(places: Sequence[int | None]) -> float:
    """Return the mean reciprocal rank of places that count from 0; None, which was not found, counts nothing."""
    return sum(1 / (1 + place) for place in places if place is not None) / max(1, len(places))


def recall(places: Sequence[int | None], depth: int) -> float:
    """Return the share of places that are among the first `depth`."""
    return sum(place is not None and place < depth for place in places) / max(1, len(places))


def reordered(found: Sequence[int], scores: Sequence[float]) -> list[int]:
    """Return passages in falling order of their scores, ties in the order that they had."""
    order = sorted(range(len(found)), key=lambda at: (-scores[at], at))
    return [found[at] for at in order]


def place_of(right: int, found: Sequence[int]) -> int | None:
    """Return how many passages stand before the right one, None where it is not there."""
    return found.index(right) if right in found else None
