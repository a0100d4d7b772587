"""The page mirror: records which pages a helper on another machine has, so that only changed pages are sent."""

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
    """A step's needs in one layer group: the distinct `pages` that its rows attend to, and the `tokens` needed of each.

    The keys and values of row i go to `offsets[i]` of page `row_pages[i]`.
    """

    pages: Ints
    tokens: Ints
    row_pages: Ints
    offsets: Ints


class PageMirror:
    """Records, for each layer of each page, the page version and the number of tokens that the helper has.

    Both sides append rows to a page without a new version. Every other write makes a new version (see
    `PageMemory.versions`), of which the helper has no tokens.
    """

    def __init__(self, pools: Sequence[PageMemory]) -> None:
        """Begin with a helper that has no page of `pools`; ValueError if the pools keep no versions."""
        self._pools = list(pools)
        self._versions = [_versions(pool) for pool in pools]
        self._seen = [np.zeros_like(versions) for versions in self._versions]
        self._known = [np.zeros(versions.shape, np.int64) for versions in self._versions]
        self._raw = [pool.raw() for pool in pools]

    def needs(self, step: StepTables) -> list[PageNeeds]:
        """Return the pages that a step needs, by layer group."""
        counts = np.diff(step.ends, prepend=0)
        lasts, firsts = step.positions[step.ends - 1], step.positions[step.ends - counts]
        return [
            _needs(step, group, counts, firsts, lasts, pool.window)
            for group, pool in enumerate(self._pools)
        ]

    def lacking(self, group: int, layer: int, needs: PageNeeds) -> NDArray[np.bool_]:
        """Return for each needed page whether the helper lacks tokens of this layer."""
        return self._lacks(group, slice(layer, layer + 1), needs)[:, 0]

    def most_lacking(self, needs: Sequence[PageNeeds]) -> int:
        """Return the largest number of bytes that the helper lacks in any single layer."""
        most = 0
        for group, each in enumerate(needs):
            lacks = self._lacks(group, slice(None), each)
            count = int(lacks.sum(axis=0).max(initial=0))
            most = max(most, count * self.page_bytes(group))
        return most

    def _lacks(self, group: int, layers: slice, needs: PageNeeds) -> NDArray[np.bool_]:
        """Return, shaped (pages, layers), whether the helper lacks tokens or has an old version."""
        pages = needs.pages
        other = self._versions[group][pages, layers] != self._seen[group][pages, layers]
        found: NDArray[np.bool_] = other | (
            self._known[group][pages, layers] < needs.tokens[:, None]
        )
        return found

    def page_bytes(self, group: int) -> int:
        """Return the bytes of one layer of one of a group's pages."""
        return int(self._raw[group].shape[2])

    def read(self, group: int, layer: int, needs: PageNeeds, chosen: Ints) -> tuple[Ints, bytes]:
        """Return the `chosen` pages (indices in `needs`) and one layer's bytes of them, and record them as sent."""
        pages = needs.pages[chosen]
        # The version is read before the bytes: a write in between makes a newer version.
        self._seen[group][pages, layer] = self._versions[group][pages, layer]
        self._known[group][pages, layer] = needs.tokens[chosen]
        return pages, self._raw[group][pages, layer].tobytes()

    def appended(self, group: int, layer: int, needs: PageNeeds) -> None:
        """Record that the helper appends the step's rows in a layer; it has all earlier tokens of their pages."""
        pages, begun = needs.row_pages, needs.row_pages[needs.offsets == 0]
        self._seen[group][begun, layer] = self._versions[group][begun, layer]
        # Of several rows in one page the last assignment stays.
        self._known[group][pages, layer] = needs.offsets + 1

    def missed(self, step: StepTables) -> None:
        """Record that a step's rows were appended in this process only, so that the helper lacks them."""
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
