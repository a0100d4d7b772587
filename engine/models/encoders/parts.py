"""Parts of a batch: which texts one thread computes by itself, where that ends sooner than all threads together."""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise

# Large batches are cut into parts of about so many tokens; smaller parts take longer per token.
PART_TOKENS = 512
# Threads that share each product take so many times as long per token, since all wait for one whose core is busy.
_SHARING = 1.2


def parts_of(lengths: Sequence[int], threads: int, waits_tokens: float) -> list[slice]:
    """Return the parts of a batch of texts of these lengths, or none if all threads had better share each product.

    Sharing takes as long as one thread takes for `waits_tokens` tokens, and a fifth of the batch's time more.
    """
    total = sum(lengths)
    rounds = max(1, total // (PART_TOKENS * threads))
    parts = split(lengths, rounds * threads) if threads > 1 else [slice(0, len(lengths))]
    shared = _SHARING * total / threads + waits_tokens
    return parts if _end([sum(lengths[part]) for part in parts], threads) <= shared else []


def split(lengths: Sequence[int], parts: int) -> list[slice]:
    """Cut texts of these lengths into at most `parts` runs with about equal numbers of tokens."""
    ends = list(accumulate(lengths))
    cuts = [bisect(ends, ends[-1] * number // parts) for number in range(1, parts)]
    edges = sorted({0, *cuts, len(lengths)})
    return [slice(*pair) for pair in pairwise(edges)]


def _end(parts: Sequence[int], threads: int) -> int:
    """Return when the last of these parts ends, in tokens of one thread; each free thread takes the next part."""
    ends = [0] * threads
    for tokens in parts:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends)
