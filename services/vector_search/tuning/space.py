"""The settings that tuning explores, and the search for the least effort that finds enough."""

from __future__ import annotations

from collections.abc import Callable

from services.vector_search.index.quantizer import USUAL, Coding
from services.vector_search.index.quantizer_training import LEAST_PER_LIST

# Fewer rows are compared one by one in less time than any structure saves.
LEAST_ROWS = 1000
_FEWEST_LISTS = 64
# Links of a graph's nodes: M.
LINKS = (16, 32, 8)
# How rows in lists are coded: the first is tried with every number of lists, others with the best and those beside it.
CODINGS = (USUAL, Coding(4), Coding(8, rotate=False), Coding(4, rotate=False))
# Few links are not tried where a walk needs this many candidates, nor many where it needs fewer.
_LONG_WALK, _SHORT_WALK = 64, 24
# A number of lists is left out where reading them without error would already take this share of the best time.
_HOPELESS = 1.0
# The recalls that the front is explored at, beside the goal.
LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def numbers_of_lists(rows: int, trained: int) -> list[int]:
    """Return the numbers of lists (nlist) for so many rows, of which `trained` at most are trained from.

    They are powers of two from 2^6 to that / 39.

    The first is near the root of the rows, where the best often is; the others follow by their distance from it.
    """
    most = min(rows, trained) // LEAST_PER_LIST
    found = [1 << e for e in range(_FEWEST_LISTS.bit_length() - 1, most.bit_length())]
    middle = 1.5 * rows**0.5
    return sorted(found, key=lambda lists: max(lists / middle, middle / lists))


def beside(counts: list[int], best: int | None) -> list[int]:
    """Return the numbers of lists within twice and half the best, which goes first; the first where none is known."""
    near = [each for each in counts if best is not None and best <= 2 * each <= 4 * best]
    return sorted(near, key=lambda each: each != best) if near else counts[:1]


def hopeless(least_s: float, best_s: float) -> bool:
    """Return whether a setting that takes `least_s` at best cannot beat one that takes `best_s`."""
    return least_s >= _HOPELESS * best_s


def worth_trying(links: int, efforts: dict[int, int]) -> bool:
    """Return whether a graph with so many links is worth building, by the ef that others, by their links, need.

    More links shorten a long walk, fewer make the steps of a short one cheaper.
    """
    known = efforts.get(LINKS[0])
    if known is None:
        return True
    return known >= _SHORT_WALK if links > LINKS[0] else known <= _LONG_WALK


def least(enough: Callable[[int], bool], most: int) -> int | None:
    """Return the least number from 1 to `most` that is enough, None if `most` is not.

    What is enough stays enough when it grows; so powers of two are tried, and then the gap below is halved.
    """
    low, high = 0, 1
    while high < most and not enough(high):
        low, high = high, 2 * high
    high = min(high, most)
    if high == most and not enough(most):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
