"""Rows of passages: which positions of a sequence are computed, and which are taken by passages computed alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.decoder.executor.interface import PassagePlace
from engine.decoder.sequence import TokenSequence


def placed(
    sequence: TokenSequence, positions: Sequence[int]
) -> tuple[list[int], list[PassagePlace]]:
    """Return which of these rising positions are computed, and the parts of passages that take the others."""
    if not sequence.spans:
        return list(positions), []
    computed: list[int] = []
    places: list[PassagePlace] = []
    for position in positions:
        at = bisect_right(sequence.spans, position, key=lambda span: span[0]) - 1
        begin, end = sequence.spans[at] if at >= 0 else (0, 0)
        if position >= end:
            computed.append(position)
        elif places and places[-1].begin == begin and places[-1].end == position:
            places[-1] = places[-1]._replace(end=position + 1)
        else:
            tokens = [sequence.prompt[0], *sequence.prompt[begin:end]]
            places.append(PassagePlace(sequence.root, tokens, begin, position, position + 1))
    return computed, places


def computed_rows(sequence: TokenSequence) -> int:
    """Return the number of rows outside of spans to compute before a sequence's next token can be drawn."""
    spans = sum(
        max(0, min(b, end) - max(a, begin))
        for a, b in sequence.todo
        for begin, end in sequence.spans
    )
    return sequence.rows - spans
