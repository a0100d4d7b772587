"""The mirror of a gpu_worker's pages that a helper on another machine has, so that only what changed is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.pages.identity import PAGE
from engine.host.channel import StepTables
from engine.kernels.page_memory import PageMemory

Ints = NDArray[np.int64]


class PageNeeds(NamedTuple):
    """What a step's rows need of one layer group: distinct `pages`, and how many tokens of each are attended to.

    The rows' own keys and values go to `offsets` of `row_pages`, row by row.
    """

    pages: Ints
    tokens: Ints
    row_pages: Ints
    offsets: Ints


class PageMirror:
    """Knows of each layer of each page how many tokens the helper has, and of which version of the page.

    A page grows by the rows that are appended on both sides. Any other writing makes another version (see
    `PageMemory.versions`), of which the helper has nothing.
    """

    def __init__(self, pools: Sequence[PageMemory]) -> None:
        """Begin with a helper that has nothing of `pools`; ValueError if they keep no versions."""
        self._pools = list(pools)
        self._versions = [_versions(pool) for pool in pools]
        self._seen = [np.zeros_like(versions) for versions in self._versions]
        self._known = [np.zeros(versions.shape, np.int64) for versions in self._versions]
        self._raw = [pool.raw() for pool in pools]

    def needs(self, step: StepTables) -> list[PageNeeds]:
        """Return what a step needs of each layer group."""
        counts = np.diff(step.ends, prepend=0)
        lasts, firsts = step.positions[step.ends - 1], step.positions[step.ends - counts]
        return [
            _needs(step, group, counts, firsts, lasts, pool.window)
            for group, pool in enumerate(self._pools)
        ]

    def lacking(self, group: int, layer: int, needs: PageNeeds) -> NDArray[np.bool_]:
        """Return of which of the pages the helper has too little in a layer of a group."""
        return self._lacks(group, slice(layer, layer + 1), needs)[:, 0]

    def most_lacking(self, needs: Sequence[PageNeeds]) -> int:
        """Return the bytes that the helper lacks in that layer of which it lacks most."""
        most = 0
        for group, each in enumerate(needs):
            lacks = self._lacks(group, slice(None), each)
            count = int(lacks.sum(axis=0).max(initial=0))
            most = max(most, count * self.page_bytes(group))
        return most

    def _lacks(self, group: int, layers: slice, needs: PageNeeds) -> NDArray[np.bool_]:
        """Return whether the helper has too little (pages, layers)."""
        pages = needs.pages
        other = self._versions[group][pages, layers] != self._seen[group][pages, layers]
        found: NDArray[np.bool_] = other | (
            self._known[group][pages, layers] < needs.tokens[:, None]
        )
        return found

    def page_bytes(self, group: int) -> int:
        """Return the size of one layer of a page of a group."""
        return int(self._raw[group].shape[2])

    def read(self, group: int, layer: int, needs: PageNeeds, chosen: Ints) -> tuple[Ints, bytes]:
        """Return some of the pages, by their places in `needs`, and a layer of them as bytes, which the helper gets."""
        pages = needs.pages[chosen]
        # Read before the bytes: what is written meanwhile is another version.
        self._seen[group][pages, layer] = self._versions[group][pages, layer]
        self._known[group][pages, layer] = needs.tokens[chosen]
        return pages, self._raw[group][pages, layer].tobytes()

    def appended(self, group: int, layer: int, needs: PageNeeds) -> None:
        """Note that the helper appends the rows in a layer, having all that lies before them."""
        pages, begun = needs.row_pages, needs.row_pages[needs.offsets == 0]
        self._seen[group][begun, layer] = self._versions[group][begun, layer]
        # Of several rows in a page the last counts.
        self._known[group][pages, layer] = needs.offsets + 1

    def missed(self, step: StepTables) -> None:
        """Note that a step's rows were appended here, and the helper knows nothing of it."""
        for group, needs in enumerate(self.needs(step)):
            np.minimum.at(self._known[group], needs.row_pages, needs.offsets[:, None])


def _versions(pool: PageMemory) -> NDArray[np.uint32]:
    if pool.versions is None:
        raise ValueError("pages outside a segment keep no versions")
    return pool.versions


def _needs(
    step: StepTables, group: int, counts: Ints, firsts: Ints, lasts: Ints, window: int | None
) -> PageNeeds:
    table, starts = step.tables[group].astype(np.int64), step.starts[group]
    lengths = np.diff(starts)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    logical = np.arange(len(table)) - np.repeat(starts[:-1], lengths)
    tokens = np.clip(lasts[owners] - logical * PAGE, 0, PAGE)
    if window is not None:
        tokens[logical < np.maximum(0, firsts - window + 1)[owners] // PAGE] = 0
    some = (tokens > 0) & (table >= 0)
    pages, places = np.unique(table[some], return_inverse=True)
    most = np.zeros(len(pages), np.int64)
    np.maximum.at(most, places, tokens[some])
    row_pages = table[np.repeat(starts[:-1], counts) + step.positions // PAGE]
    return PageNeeds(pages, most, row_pages, step.positions % PAGE)
