"""The page tiers of one worker, device and host: their pools, and the moves of pages between them. No bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.pages.identity import PageId
from engine.decoder.executor.interface import LocalTier, ModelShape, PageMove
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import Policy, make_policy
from engine.decoder.kv.home_pages import HomePages
from engine.decoder.kv.page_pool import PagePool

SPARE = 0.25  # share of a tier to keep evictable without a loss (Pensieve, 3.2)
UNLIKELY = 0.1  # a page that is expected to be used fewer times is not copied down; unknown pages are expected more
AT_ONCE = 64  # pages to look at beyond the lacking ones, so that the next look comes later
Price = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class TierPolicy(NamedTuple):
    """The eviction policy, and the seconds to recompute a page (by its depth), and to move a page between tiers.

    A page is saved to the host and loaded from it, put below the host and fetched from there. 0.0: unknown. `competes`
    tells whether copies to lower tiers take time of cores that compute.
    """

    policy: str = "spillway"
    price: Price = np.ones_like
    save_s: Callable[[], float] = lambda: 0.0
    load_s: Callable[[], float] = lambda: 0.0
    put_s: Callable[[], float] = lambda: 0.0
    fetch_s: Callable[[], float] = lambda: 0.0
    competes: Callable[[], bool] = lambda: True


PLAIN = TierPolicy()


class PageTiers:
    """A pool on the device and a pool on the host for each layer group; a page has at most one copy in each.

    A move holds its source and its target page until `moved`. Host pages that a step reads or writes are held until the
    step has `ended`, even if its sequences leave earlier, since free host pages may be reused at any time.
    """

    def __init__(self, shape: ModelShape, keeping: TierPolicy) -> None:
        self.now_s = 0.0
        self.history = History()
        self.keeping = keeping
        self.found: Counter[str] = Counter()  # needed pages by the tier that had them
        self.saved_s = 0.0  # seconds of recomputing that found pages have saved
        self.corrupt = 0
        self.moving: set[PageMove] = set()
        self.read: Counter[tuple[LocalTier, int, int]] = Counter()
        self.origin: dict[PageId, str] = {}  # the tier from which a page came to the host
        # Host pages that sequences have left since the last step was planned; host pages that steps have filled.
        self.left: list[tuple[int, int]] = []
        self.written: list[tuple[int, int]] = []
        self.device = [self._pool(shape.pages) for _ in shape.windows]
        self.host = [self._pool(shape.host_pages) for _ in shape.windows]
        self.homes = HomePages({"device": self.device, "host": self.host})
        for above, below in zip(self.device, self.host, strict=True):
            below.gone = self._gone(above)

    def _pool(self, pages: int) -> PagePool:
        def order() -> Policy:
            return make_policy(self.keeping.policy, self.history, self.keeping.price)

        return PagePool(pages, order, lambda: self.now_s)

    def _gone(self, above: PagePool) -> Callable[[PageId], None]:
        def gone(page_id: PageId) -> None:
            above.back(page_id, None)
            self.origin.pop(page_id, None)

        return gone

    def has(self, group: int, page_id: PageId) -> bool:
        """True if the page is on the device or on the host."""
        pools = self.device[group], self.host[group]
        return any(pool.find(page_id) is not None for pool in pools)

    def note(self, depths: Sequence[int], *, held: int, computed: int) -> None:
        """Count the pages that a sequence needs.

        The pages at `depths` need no computing, `held` of them were on the device, and `computed` pages are in no tier.
        """
        self.found["device"] += held
        self.found["computed"] += computed
        self.saved_s += float(self.keeping.price(np.array(depths, dtype=np.float64)).sum())

    def load(self, group: int, page_id: PageId) -> tuple[int, PageMove | None]:
        """Take a reference to a page on the device; return the page, and the load to make if only the host has it."""
        device, host = self.device[group], self.host[group]
        page = device.find(page_id)
        if page is not None:
            self.found["device"] += 1
            device.hold(page)
            return page, None
        self.found[self.origin.pop(page_id, "host")] += 1
        source = host.find(page_id)
        assert source is not None
        page = device.allocate()
        device.publish(page, page_id)
        device.back(page_id, self.keeping.load_s())
        # The move holds both pages, so that no other sequence gets the page before its bytes have arrived.
        device.hold(page)
        host.hold(source)
        move = PageMove("load", group, page_id, source, page)
        self.moving.add(move)
        return page, move

    def pools(self, tier: LocalTier) -> list[PagePool]:
        """Return the pools of a tier, one for each layer group."""
        return self.host if tier == "host" else self.device

    def publish(self, tier: LocalTier, group: int, page: int, page_id: PageId) -> None:
        """Give a page that steps have filled its id; a host page is added to `written`, since it lacks checksums."""
        host = self.host[group]
        if tier == "device":
            self.device[group].publish(page, page_id)
            return
        known = host.find(page_id) is not None
        host.publish(page, page_id)
        if not known and host.find(page_id) == page:
            self.written.append((group, page))
        self.backed(group, page_id)

    def backed(self, group: int, page_id: PageId) -> None:
        """Record in the device's pool that the host has a copy of a page, if it has."""
        if self.host[group].find(page_id) is not None:
            self.device[group].back(page_id, self.keeping.load_s())

    def find_in_place(self, group: int, page_id: PageId) -> int | None:
        """Take a reference to a host page to attend to in place; None if the host does not have it."""
        page = self.homes.find("host", group, page_id)
        if page is not None:
            self.found[self.origin.pop(page_id, "host")] += 1
        return page

    def leave(self, tier: LocalTier, group: int, page: int, *, unseen: bool = False) -> None:
        """Drop a sequence's reference to a page: at once on the device, at the end of the step on the host."""
        if tier == "host":
            self.left.append((group, page))
        else:
            self.device[group].release(page, unseen=unseen)

    def ended(self) -> None:
        """Record that all planned steps have ended."""
        for group, page in self.left:
            self.host[group].release(page)
        self.left = []
        self.homes.ended()

    def saves(self, most: int) -> list[PageMove]:
        """Return up to `most` moves per group to the host, least valuable first, if less than a quarter is spare.

        Only pages that are worth a copy, also in place of the page that the host gives up for the copy.
        """
        moves = []
        for group, (device, host) in enumerate(zip(self.device, self.host, strict=True)):
            found = self._to_copy(device, most, "host") if host.total else []
            if beyond := found[host.spare :]:
                given_up = host.bare(len(beyond))
                beyond = beyond[: len(given_up)]
                gained = self._returns(beyond) - self._returns(given_up)
                found = found[: host.spare] + self._worth_copying(beyond, gained, "host")
            host.free_up(len(found))
            for page_id in found:
                if not host.available:
                    break
                page = device.find(page_id)
                assert page is not None
                device.hold(page)
                moves.append(PageMove("save", group, page_id, page, host.allocate()))
        self.moving.update(moves)
        return moves

    def _to_copy(self, pool: PagePool, most: int, to: Literal["host", "below"]) -> list[PageId]:
        """Return up to `most` pages to copy to a lower tier, least valuable first, if less than a quarter is spare.

        Pages that are unlikely to be used again become spare, more at once than are needed now.
        """
        short = _short(pool)
        if short <= 0:
            return []
        found = pool.bare(min(most, short))
        if len(worth := self._worth_copying(found, self._returns(found), to)) == len(found):
            return found
        found = pool.bare(short + AT_ONCE)
        returns = self._returns(found)
        for page_id, unlikely in zip(found, (returns < UNLIKELY).tolist(), strict=True):
            if unlikely:
                pool.back(page_id, None)
        worth = self._worth_copying(found, returns, to)
        return worth[: max(0, min(most, _short(pool)))]

    def _returns(self, pages: Sequence[PageId]) -> NDArray[np.float64]:
        return self.history.returns(pages, self.now_s)

    def _worth_copying(
        self, pages: Sequence[PageId], returns: NDArray[np.float64], to: Literal["host", "below"]
    ) -> list[PageId]:
        """Return the pages whose copy to the host, or below it, is expected to save more time than it takes.

        A copy saves recomputing, less the time to bring the page back, for each of the page's `returns`: the turns
        that are expected to use the page, less those that would use the page given up for it.
        """
        if not pages:
            return []
        keeping = self.keeping
        copy_s, back_s = (
            (keeping.save_s(), keeping.load_s())
            if to == "host"
            else (keeping.put_s(), keeping.fetch_s())
        )
        if not keeping.competes():
            copy_s = 0.0
        depths = np.array([self.history.depth(page) for page in pages], dtype=np.float64)
        saved_s = np.maximum(keeping.price(depths) - back_s, 0.0)
        worth = (returns >= UNLIKELY) & (returns * saved_s >= copy_s)
        return [page for page, good in zip(pages, worth.tolist(), strict=True) if good]

    def moved(self, move: PageMove, *, sound: bool) -> None:
        """Record that a move has ended; if its bytes are not `sound`, forget the damaged copies."""
        device, host = self.device[move.group], self.host[move.group]
        self.moving.remove(move)
        if move.kind == "load":
            self.corrupt += not sound
            if not sound:
                device.forget(move.page_id)
                host.forget(move.page_id)
            device.release(move.target)
            host.release(move.source)
            return
        if sound and device.find(move.page_id) == move.source:  # else forgotten meanwhile
            host.publish(move.target, move.page_id)
        host.release(move.target)
        if sound and host.find(move.page_id) is not None:
            device.back(move.page_id, self.keeping.load_s())
        device.release(move.source)

    def sinking(self, group: int, most: int) -> list[PageId]:
        """Return up to `most` pages to copy below the host, least valuable first, if less than a quarter is spare."""
        return self._to_copy(self.host[group], most, "below")

    def sunk(self, group: int, page_id: PageId) -> None:
        """Record that a tier below the host has a copy of a page."""
        self.host[group].back(page_id, self.keeping.fetch_s())

    def hold(self, group: int, page_id: PageId) -> tuple[LocalTier, int] | None:
        """Hold a page to read it; return its tier and number, or None if neither device nor host has it."""
        pools: tuple[tuple[LocalTier, PagePool], ...] = (
            ("host", self.host[group]),
            ("device", self.device[group]),
        )
        for tier, pool in pools:
            page = pool.find(page_id)
            if page is not None:
                pool.hold(page)
                self.read[tier, group, page] += 1
                return tier, page
        return None

    def let_go(self, group: int, tier: LocalTier, page: int) -> None:
        """Release a page that was held for reading."""
        self.read[tier, group, page] -= 1
        (self.host if tier == "host" else self.device)[group].release(page)

    def bring(self, group: int, page_id: PageId) -> int | None:
        """Return a host page to fill from a lower tier; None if device or host has the page, or without room."""
        host = self.host[group]
        known = host.find(page_id) is not None or self.device[group].find(page_id) is not None
        return None if known or not host.available else host.allocate()

    def brought(self, group: int, page_id: PageId, page: int, origin: str | None) -> None:
        """Record that a host page was filled from the tier `origin`, or (None) could not be filled."""
        host = self.host[group]
        if origin is not None:
            host.publish(page, page_id)
            if host.find(page_id) == page:
                self.origin[page_id] = origin
        host.release(page)

    def forget(self, ids: Iterable[PageId]) -> tuple[int, int]:
        """Forget the ids of pages; return how many pages the device had, and how many the host had.

        A page held by a sequence stays until the sequence releases it, and is then free.
        """
        found = Counter[LocalTier]()
        for page_id in ids:
            sides: tuple[tuple[LocalTier, list[PagePool]], ...] = (
                ("device", self.device),
                ("host", self.host),
            )
            for tier, pools in sides:
                found[tier] += any(pool.find(page_id) is not None for pool in pools)
                for pool in pools:
                    pool.forget(page_id)
        return found["device"], found["host"]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken (for tests)."""
        for device, host in zip(self.device, self.host, strict=True):
            device.check()
            host.check()


def _short(pool: PagePool) -> int:
    """Return the number of pages that a pool lacks for a quarter of it to be spare."""
    return math.ceil(SPARE * pool.total) - pool.spare
