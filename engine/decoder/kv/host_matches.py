"""Matches on the host: how many pages of a match the host has, and how long a front could stay there.

A match is what `PageTable.match` found of a sequence's tokens in the tiers.
"""

from __future__ import annotations

from common.pages.identity import CHUNK, PAGE
from engine.decoder.kv.page_table import PageTable, PrefixMatch
from engine.decoder.sequence import TokenSequence


def stands_on_host(
    table: PageTable, sequence: TokenSequence, match: PrefixMatch
) -> tuple[int, int, int]:
    """Return the number of a match's pages on the host, of unheld ones among these, and of pages not on the host.

    With several groups the least favourable counts.
    """
    found = []
    for group, (held, loads) in enumerate(zip(match.pages, match.loads, strict=True)):
        pool = table.tiers.host[group]
        above = [sequence.ids[at] for at, page in enumerate(held) if page >= 0]
        there = [sequence.ids[at] for at in loads]
        there += [page_id for page_id in above if pool.find(page_id) is not None]
        idle = sum(not pool.holds(page_id) for page_id in there)
        found.append((len(there), idle, len(above) + len(loads) - len(there)))
    pages, idles, copies = zip(*found, strict=True)
    return min(pages), max(idles), max(copies)


def front_on_host(table: PageTable, sequence: TokenSequence, match: PrefixMatch) -> int:
    """Return the number of a match's first pages that may stay on the host as a front: whole chunks, all there."""
    if table.windowed:
        return 0  # windows leave the first pages behind
    there = 0
    while there < match.todo[0][0] // PAGE and all(
        pool.find(sequence.ids[there]) is not None for pool in table.tiers.host
    ):
        there += 1
    return there // CHUNK * CHUNK
