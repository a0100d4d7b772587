"""Marks: every 8th page of a chain; by these few ids the workers that hold a prompt's prefix are found."""

from __future__ import annotations

from collections.abc import Sequence

from common.pages.identity import PageId

STRIDE = 8  # pages from one mark to the next


def marks_of(ids: Sequence[PageId]) -> list[PageId]:
    """Return the marks among a chain's pages; each mark stands for itself and the pages since the mark before it."""
    return list(ids[STRIDE - 1 :: STRIDE])
