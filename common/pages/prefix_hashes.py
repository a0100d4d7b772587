"""Marks: every 8th page of a chain, by which prompts find who holds their prefix without naming all of it."""

from __future__ import annotations

from collections.abc import Sequence

from common.pages.identity import PageId

STRIDE = 8  # pages from one mark to the next


def marks_of(ids: Sequence[PageId]) -> list[PageId]:
    """Return the marks among a chain's pages, each of which stands for itself and the pages since the one before."""
    return list(ids[STRIDE - 1 :: STRIDE])
